"""Script that computes a recorded step with the `lm_trainer` on the path, and prints the first difference as JSON.

`lmt bisect code` runs this file with the code of another commit, so it uses few names of the package.
"""

import json
import sys


def main(run: str, step: int, overrides: list[str]) -> dict[str, object]:
    """Computes the steps from the nearest checkpoint, at least two if possible, and compares them with the record.

    An update shows only in the step after it, so one step does not suffice.
    """
    from lm_trainer.core.runtime import prepare_process

    prepare_process()
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.reproduce.verify import Segment, verify_segment
    from lm_trainer.trackers.jsonl import encode_non_finite

    record = RunRecord.read(run)
    start = record.find_start(max(step - 2, record.start), step)
    with QuietProgress(step, stream=sys.stderr) as progress:
        segment = verify_segment(record, Segment(start, step), overrides=overrides, progress=progress)
    difference = segment.difference
    return {"difference": None if difference is None else encode_non_finite(difference._asdict()), "error": None}


if __name__ == "__main__":
    try:
        result = main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        result = {"difference": None, "error": lines[0]}
    sys.stdout.write(json.dumps(result) + "\n")
