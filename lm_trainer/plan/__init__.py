"""Plans of runs before any accelerator is there: memory, FLOPs, time and cost."""

from lm_trainer.plan.devices import DeviceGroup, emulate_devices, parse_bytes, parse_devices
from lm_trainer.plan.run import Assumptions, RunPlan, plan_run

__all__ = [
    "Assumptions",
    "DeviceGroup",
    "RunPlan",
    "emulate_devices",
    "parse_bytes",
    "parse_devices",
    "plan_run",
]
