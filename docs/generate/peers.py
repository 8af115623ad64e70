"""Speeds next to other frameworks, from the tables that `benchmarks.peers` and `benchmarks.bfloat16_products` write."""

from collections.abc import Iterator
from dataclasses import dataclass

from docs.generate.repository import ROOT, table_rows

RESULTS = ROOT / "benchmarks/results/2-core-epyc"
SHAPES = {
    "nano": "GPT-2, 0.8M",
    "levanter-nano": "GPT-2, 0.3M, 1024 positions",
    "30m": "GPT-2, 30M",
    "llama-30m": "Llama, 48M",
    "124m": "GPT-2, 124M",
}
KINDS = {
    "lmt": "lm_trainer, `elastic`",
    "lmt fast": "lm_trainer, `fast`",
    "jax twin": "plain JAX",
    "nnx": "plain Flax NNX",
    "levanter": "Levanter",
    "torch eager": "PyTorch eager",
    "torch compile": "PyTorch compiled",
    "torch eager+alloc": "PyTorch eager, our allocator settings",
    "torch compile+alloc": "PyTorch compiled, our allocator settings",
}


@dataclass(frozen=True)
class Peers:
    """The results of one shape."""

    milliseconds: dict[str, float]
    """Median time of a step, by kind."""
    product_share: dict[str, float]
    """Rate of a step as a fraction of the rate of a large matrix product, by kind."""
    ratios: dict[str, float]
    """Median over the turns of the time of `lmt` by the time of each other kind."""


def read_peers(shape: str) -> Peers:
    """Reads the results of a shape."""
    rows = table_rows(RESULTS / f"peers_{shape}.md")
    # Three tables: times, ratios of wall time, and the same ratios of CPU time.
    heads = [number for number, cells in enumerate(rows) if cells[0] == "kind"]
    times, (ratio_heads, lmt_ratios) = rows[1 : heads[1]], rows[heads[1] : heads[1] + 2]
    return Peers(
        {cells[0]: float(cells[1].replace(",", "")) for cells in times},
        {cells[0]: float(cells[6].rstrip(" %")) / 100 for cells in times},
        {head.removeprefix("/ "): float(cell) for head, cell in zip(ratio_heads[1:], lmt_ratios[1:], strict=True)},
    )


def peers_table() -> str:
    """Returns the table of the time of a step with the defaults, relative to the other kinds."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    others = [kind for kind in KINDS if not kind.startswith("lmt")]
    yield f"| | {' | '.join(KINDS[kind] for kind in others)} | of a matrix product |"
    yield f"|---|{'---:|' * (len(others) + 1)}"
    for shape, label in SHAPES.items():
        peers = read_peers(shape)
        cells = [f"{peers.ratios[kind]:.2f}" if kind in peers.ratios else "" for kind in others]
        yield f"| {label} | {' | '.join(cells)} | {100 * peers.product_share['lmt']:.0f} % |"


def bfloat16_table() -> str:
    """Returns the table of the rates of products in float32 and bfloat16."""
    lines = (RESULTS / "bfloat16_products.md").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))
