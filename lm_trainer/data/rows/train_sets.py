"""The training sets of a configuration, and the order that combines them."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.row_values import RowValues
from lm_trainer.data.config import DataConfig
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.tokenize.open_cache import OpenCache


class TrainSets:
    """The sets to train on, as far as they are final, and the rules for combining them.

    Args:
        config: the `data` section.
        row_builder: the builder that splits caches into rows.
        caches: every cache, keyed by `NAME/train` and `NAME/validation`.
    """

    def __init__(self, config: DataConfig, row_builder: RowBuilder, caches: Mapping[str, OpenCache]):
        self._config, self._row_builder = config, row_builder
        self.caches = {name: caches[f"{name}/train"] for name in config.trained}
        # Final sets are cached, because a packing plan takes a long time to compute.
        self._final: dict[str, TrainSet] = {}
        self.frozen: RowValues | None = None
        """Values of a frozen model for the row at each position of the run."""

    def current_sets(self) -> list[TrainSet]:
        """Returns the sets in configuration order.

        Raises:
            UserError: if the full text of a set is shorter than a row.
        """
        return [self._train_set(name) for name in self._config.trained]

    def _train_set(self, name: str) -> TrainSet:
        if name not in self._final:
            train_set = self._row_builder.train_set(name, self.caches[name])
            if not train_set.final:
                return train_set
            self._final[name] = train_set
        return self._final[name]

    @property
    def waits_for_all(self) -> str | None:
        """The setting that makes the first batch wait for all training text; None if no setting does."""
        config = self._config
        if config.exclude:
            return "data.exclude"
        if config.without is not None:
            return "data.without"
        if config.stop_strategy != "restart":
            return f"data.stop_strategy: {config.stop_strategy}"
        if config.packed:
            return "data.packing: best_fit"
        if config.features_shape is not None:
            return "data.format: audio"
        unlimited = any(config.value_for_set(config.max_train_batches, name) is None for name in config.trained)
        return "data.shuffle: true" if unlimited and config.shuffle_config.num_rows_needed(0) is None else None

    @property
    def needs_all(self) -> bool:
        """True if every set must be complete before the first row, as its end decides its packing or the data's end."""
        config = self._config
        if config.exclude or config.without is not None or config.features_shape is not None:
            return True
        return config.stop_strategy != "restart" or config.packed

    def train_order(self, schedule: BatchSchedule) -> TrainOrder:
        """Returns the rows of a run with these batch sizes in order, as far as they are final."""
        sets = []
        for train in self.current_sets():
            batches = self._config.value_for_set(self._config.max_train_batches, train.name)
            # Without a limit, asks for one row more than exist, which a growing set never reaches, so it is not final.
            max_rows = train.num_rows + 1 if batches is None else batches * schedule.at(0)
            reached = train.num_rows >= max_rows
            sets.append(replace(train, num_rows=min(train.num_rows, max_rows), final=train.final or reached))
        # Weights change at given steps, but the mixture counts rows.
        mixture = Mixture([(schedule.rows_before(step), shares) for step, shares in self._config.stages])
        final = all(train.final for train in sets)
        return TrainOrder(sets, mixture, self._order_length(sets, mixture) if final else None, self.frozen)

    def order_for_steps(self, schedule: BatchSchedule, steps: range) -> TrainOrder:
        """Returns the order of training. If it is final, it must be long enough for these steps.

        Raises:
            UserError: if the data end earlier according to `data.stop_strategy`.
        """
        order = self.train_order(schedule)
        max_steps = num_full_steps(order, schedule)
        if max_steps is not None and steps.stop > max_steps:
            raise UserError(
                f"the data end after {max_steps} steps, by data.stop_strategy: {self._config.stop_strategy}, but "
                f"{steps.stop} are asked for; set trainer.num_train_steps to {max_steps} or data.stop_strategy "
                "to restart"
            )
        return order

    def _order_length(self, sets: Sequence[TrainSet], mixture: Mixture) -> int | None:
        config = self._config
        if config.stop_strategy == "restart":
            return None
        draws = [train.num_rows * (config.value_for_set(config.epochs, train.name) or 1) for train in sets]
        if config.stop_strategy == "first_exhausted":
            # For each set, the first position that would draw from it after it is exhausted.
            ends = [mixture.position_of_draw(index, count) for index, count in enumerate(draws)]
            return min((end for end in ends if end is not None), default=sys.maxsize)
        # The data end after the last draw of the last set to be exhausted, or never if the weights never exhaust a set.
        last_positions = [mixture.position_of_draw(index, count - 1) for index, count in enumerate(draws)]
        return None if None in last_positions else max(last + 1 for last in last_positions if last is not None)


def num_full_steps(order: TrainOrder, schedule: BatchSchedule) -> int | None:
    """Returns the number of full batches before the order ends; None if it is endless or not final."""
    if order.length is None:
        return None
    # Each step has at least one row, so the number of rows bounds the number of steps.
    return bisect.bisect_right(range(order.length + 1), order.length, key=schedule.rows_before) - 1
