"""Plans of runs, which need no accelerator: memory, FLOPs, time and cost."""

from lm_trainer.plan.devices import DeviceGroup, emulate_devices, parse_bytes, parse_devices
from lm_trainer.plan.layouts import Layout
from lm_trainer.plan.run import Assumptions, RunPlan, plan_run
from lm_trainer.plan.search import Candidate, Search, search_layouts

__all__ = [
    "Assumptions",
    "Candidate",
    "DeviceGroup",
    "Layout",
    "RunPlan",
    "Search",
    "emulate_devices",
    "parse_bytes",
    "parse_devices",
    "plan_run",
    "search_layouts",
]
