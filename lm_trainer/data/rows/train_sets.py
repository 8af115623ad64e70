"""Train sets of a configuration, and the order that they make together."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.config import DataConfig
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.tokenize.open_cache import OpenCache


class TrainSets:
    """The sets that are trained on, as far as they are certain, and the rules that join them.

    Args:
        config: the `data` section.
        row_builder: cuts caches into rows.
        caches: every cache by `NAME/train` and `NAME/validation`.
    """

    def __init__(self, config: DataConfig, row_builder: RowBuilder, caches: Mapping[str, OpenCache]):
        self._config, self._row_builder = config, row_builder
        self.caches = {name: caches[f"{name}/train"] for name in config.trained}
        # Final sets are kept, because a packing plan takes long to make.
        self._final: dict[str, TrainSet] = {}

    def current(self) -> list[TrainSet]:
        """Returns the sets in the order of the configuration.

        Raises:
            UserError: if the whole text of one does not make a row.
        """
        return [self._train_set(name) for name in self._config.trained]

    def _train_set(self, name: str) -> TrainSet:
        if name not in self._final:
            found = self._row_builder.train_set(name, self.caches[name])
            if not found.final:
                return found
            self._final[name] = found
        return self._final[name]

    @property
    def waits_for_all(self) -> str | None:
        """The setting for which the first batch needs all text that is trained on; None if the first text will do."""
        config = self._config
        if config.exclude:
            return "data.exclude"
        if config.stop_strategy != "restart":
            return f"data.stop_strategy: {config.stop_strategy}"
        if config.packed:
            return "data.packing: best_fit"
        if config.features_shape is not None:
            return "data.format: audio"
        unlimited = any(config.of_set(config.max_train_batches, name) is None for name in config.trained)
        return "data.shuffle: true" if unlimited and config.shuffle_config.rows_needed(0) is None else None

    @property
    def needed_whole(self) -> bool:
        """True if every set must be complete before the first row: its end decides its packing or the data's length."""
        config = self._config
        if config.exclude or config.features_shape is not None:
            return True
        return config.stop_strategy != "restart" or config.packed

    def order(self, schedule: BatchSchedule) -> TrainOrder:
        """Returns the rows of a run of these batch sizes by their positions, as far as they are certain."""
        sets = []
        for train in self.current():
            batches = self._config.of_set(self._config.max_train_batches, train.name)
            # Without a limit, one row more than there are: no growing set ever reaches it, and so none becomes final.
            most = train.num_rows + 1 if batches is None else batches * schedule.at(0)
            reached = train.num_rows >= most
            sets.append(replace(train, num_rows=min(train.num_rows, most), final=train.final or reached))
        # Weights change at steps, and the mixture counts rows.
        mixture = Mixture([(schedule.rows_before(step), shares) for step, shares in self._config.stages])
        final = all(train.final for train in sets)
        return TrainOrder(sets, mixture, self._length(sets, mixture) if final else None)

    def checked_order(self, schedule: BatchSchedule, steps: range) -> TrainOrder:
        """Returns the order, once it is final only if it is long enough for these steps.

        Raises:
            UserError: if the data end before, by `data.stop_strategy`.
        """
        order = self.order(schedule)
        most = whole_steps(order, schedule)
        if most is not None and steps.stop > most:
            raise UserError(
                f"the data end after {most} steps, by data.stop_strategy: {self._config.stop_strategy}, but "
                f"{steps.stop} are asked for; set trainer.num_train_steps to {most} or data.stop_strategy to restart"
            )
        return order

    def _length(self, sets: Sequence[TrainSet], mixture: Mixture) -> int | None:
        config = self._config
        if config.stop_strategy == "restart":
            return None
        draws = [train.num_rows * (config.of_set(config.epochs, train.name) or 1) for train in sets]
        if config.stop_strategy == "first_exhausted":
            # The first position at which a set would be drawn from once more than it has rows.
            ends = [mixture.position(index, count) for index, count in enumerate(draws)]
            return min((end for end in ends if end is not None), default=sys.maxsize)
        # The position after the last set's last draw; a set that the weights never exhaust makes the data endless.
        lasts = [mixture.position(index, count - 1) for index, count in enumerate(draws)]
        return None if None in lasts else max(last + 1 for last in lasts if last is not None)


def whole_steps(order: TrainOrder, schedule: BatchSchedule) -> int | None:
    """Returns the number of whole batches until the order ends; None if it does not, or is not final."""
    if order.length is None:
        return None
    # Each step has a row at least, so there are no more steps than rows.
    return bisect.bisect_right(range(order.length + 1), order.length, key=schedule.rows_before) - 1
