"""Plans of several configurations on several kinds of devices, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.run import RunPlan
from lm_trainer.plan.table import align_columns, format_bytes, format_duration


@dataclass(frozen=True)
class PlannedConfig:
    """A configuration and the devices it is planned for."""

    config: str
    """Name of the configuration."""
    devices: str
    """Devices as written by the user."""
    plan: RunPlan | None
    """The plan; None if the devices cannot share the work."""
    refused: str | None = None
    """Reason why `plan` is None."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, in SI units."""
        named = {"config": self.config, "wanted": self.devices, "refused": self.refused}
        return named if self.plan is None else {**named, **self.plan.as_dict(), **throughput_and_fit(self.plan)}


def throughput_and_fit(plan: RunPlan) -> dict[str, Any]:
    """Returns the expected tokens per second, and whether the run fits; None if unknown."""
    fits = None if plan.budget is None else plan.memory.peak.bytes <= plan.budget.bytes
    per_second = None if plan.time is None else plan.work.tokens_per_step / plan.time.step_seconds
    return {"fits": fits, "tokens_per_second": per_second}


def parse_prices(texts: Sequence[str]) -> Mapping[str, float]:
    """Parses prices per device-hour: `2.5` for all kinds of device, or `H100=2.5` for one kind.

    Returns:
        A mapping from kind in lower case ("" for all kinds) to price.

    Raises:
        UserError: if a price is not a number or is negative.
    """
    price_list = {}
    for text in texts:
        kind, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise UserError(f"--price {text}: expected a number, such as 2.5, or one for a kind of device: H100=2.5")
        price_list[kind.strip().lower()] = price
    return price_list


def find_price(group: DeviceGroup, devices: str, price_list: Mapping[str, float]) -> float | None:
    """Returns the price per device-hour; None if no price is given.

    Args:
        group: the devices.
        devices: the devices as written by the user, such as `8xH100` or `v5e:4x4`.
        price_list: the result of `parse_prices`.
    """
    written = devices.lower()
    names = (name for name in price_list if name and (name == group.kind.lower() or name in _device_names(written)))
    return next((price_list[name] for name in names), price_list.get(""))


def _device_names(written: str) -> tuple[str, ...]:
    kind = written.split(":")[0].strip()
    return kind, kind.lstrip("0123456789").lstrip(" x*").strip()


def comparison_lines(plans: Sequence[PlannedConfig]) -> Iterator[str]:
    """Yields the lines of a table with one row per plan, and the reasons for missing plans."""
    priced = any(
        planned.plan is not None and planned.plan.time is not None and planned.plan.time.cost is not None
        for planned in plans
    )
    head = ["configuration", "devices", "peak", "of", "fits", "step", "tokens/s", "time", *(["cost"] if priced else [])]
    yield from align_columns([head, *(_comparison_row(planned, priced=priced) for planned in plans)])
    for planned in plans:
        if planned.refused is not None:
            yield f"{planned.config} on {planned.devices}: {planned.refused}"
    yield "note: Steps and times are the expected ones, or those at --mfu; lmt plan of one of them says more."


def _comparison_row(planned: PlannedConfig, *, priced: bool) -> list[str]:
    plan = planned.plan
    if plan is None:
        return [planned.config, planned.devices, "none: below", *[""] * (5 + priced)]
    budget_text = "n/a" if plan.budget is None else format_bytes(plan.budget.bytes)
    rate_fields = throughput_and_fit(plan)
    fits = {None: "n/a", True: "yes", False: "NO"}[rate_fields["fits"]]
    row = [planned.config, planned.devices, format_bytes(plan.memory.peak.bytes), budget_text, fits]
    if plan.time is None:
        return [*row, "n/a", "n/a", "n/a", *(["n/a"] if priced else [])]
    cost = "n/a" if plan.time.cost is None else f"{plan.time.cost:,.2f}"
    step = f"{plan.time.step_seconds:.3g} s"
    return [
        *row,
        step,
        f"{rate_fields['tokens_per_second']:,.0f}",
        format_duration(plan.time.seconds),
        *([cost] if priced else []),
    ]
