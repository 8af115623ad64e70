"""The index of the site for language models: `python -m docs.generate.llms` writes docs/llms.txt.

The format is described at llmstxt.org: a title, a summary, and sections with links. A link is followed by the first
sentence of its page, if the page begins with one.
"""

import re
from collections.abc import Iterator

from docs.generate.repository import DOCS, ROOT

FILE = DOCS / "llms.txt"
_SUMMARY = """\
# lm_trainer

> Trains transformer language models in JAX from one YAML file. Losses and weights are bit-identical on any number of
> devices, in any number of processes, and after any number of kills and resumes.

- The command line is `lmt`: `lmt config check my.yaml` reports all problems, `lmt train my.yaml` trains or resumes, and
  `lmt COMMAND --help` shows every option. Settings of the YAML file are arguments too: `trainer.seed=1`.
- Commands that print facts have `--json`. The numbers of a run are in `logs/RUN/metrics.jsonl`.
- Exit codes: 0 done, 1 crash, 2 usage or configuration, 3 non-finite loss, 4 out of memory, 75 start it again.
- Two runs that differ in one key differ by this change alone, because everything else is equal bit for bit. The
  difference is an effect at this seed; several seeds give an interval. `lmt diff A B` lists what differs.
- `lmt golden record` and `lmt golden check` test that a change of code changes no bit.
- `AGENTS.md` in the repository says how to set up, run, check and compare.
"""
_ENTRY = re.compile(r"^( *)- (.+?):(?: ([\w/-]+\.md))?$")


def llms_text() -> str:
    """The index, with one section for each tab of the site."""
    return "\n".join([_SUMMARY.rstrip(), *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    groups: list[str] = []
    for indent, title, page in _entries(navigation):
        if not page:
            groups = [*groups[: indent // 4], title]
        if indent == 2 and not page:
            yield from ("", f"## {title}", "")
        elif page:
            name = ": ".join([*groups[1 : indent // 4], title])
            note = f": {sentence}" if (sentence := first_sentence(page)) else ""
            yield f"- [{name}]({page.removesuffix('.md')}.html){note}"


def _entries(navigation: str) -> Iterator[tuple[int, str, str]]:
    """Indentation, title and page of each entry of the navigation; the page of a group is empty."""
    for match in filter(None, map(_ENTRY.match, navigation.splitlines())):
        yield len(match[1]), match[2], match[3] or ""


def first_sentence(page: str) -> str:
    """The first sentence of a page below its title, as plain text; empty if the page does not begin with one."""
    text = re.sub(r"\A---\n.*?\n---\n", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraph = text.lstrip().partition("\n")[2].strip().split("\n\n")[0]
    if not re.match(r"[A-Z]|`(?!``)", paragraph):
        return ""
    plain = re.sub(r"\[([^]]+)\]\([^)]*\)(\{[^}]*\})?", r"\1", " ".join(paragraph.split())).replace("**", "")
    sentence = re.match(r".{12,}?(?<! al)[.:](?= |$)", plain)
    return sentence[0][:-1] + "." if sentence else ""


if __name__ == "__main__":
    FILE.write_text(llms_text(), encoding="utf-8")
