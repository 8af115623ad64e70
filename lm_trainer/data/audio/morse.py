"""Morse code as sound: texts that a model has to listen to in order to write them, made without any recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# ITU-R M.1677-1.
_TABLE = """
a .- b -... c -.-. d -.. e . f ..-. g --. h .... i .. j .--- k -.- l .-.. m -- n -. o --- p .--. q --.- r .-. s ... t -
u ..- v ...- w .-- x -..- y -.-- z --.. 0 ----- 1 .---- 2 ..--- 3 ...-- 4 ....- 5 ..... 6 -.... 7 --... 8 ---.. 9 ----.
"""
_SIGNS = _TABLE.split()
_CODES: dict[str, str] = dict(zip(_SIGNS[::2], _SIGNS[1::2], strict=True))
_EDGE_SECONDS = 0.004
"""The time in which a tone begins and ends, without which it would click."""
_LEAD_SECONDS = 0.05
"""The longest pause before the first tone."""


def units_of(text: str) -> int:
    """Units of time of a text of letters, digits and single blanks: a dot is one, a dash three."""
    return sum(length for _, length in _runs(text))


@dataclass(frozen=True)
class MorseVoice:
    """Ranges from which each row draws how it sounds."""

    unit_seconds: tuple[float, float]
    pitch: tuple[float, float]
    """Hz."""
    noise: tuple[float, float]
    """Standard deviation of the noise, where a tone has the amplitude 1."""

    def speak(self, text: str, sampling_rate: int, rng: np.random.Generator, *, signal: bool = True) -> np.ndarray:
        """Returns float32 samples in [-1, 1].

        Args:
            text: letters, digits and single blanks.
            sampling_rate: Hz.
            rng: for speed, pitch, pause, loudness and noise.
            signal: False leaves the tones out: the same noise, and nothing to hear.
        """
        unit, pitch, noise = (rng.uniform(*bounds) for bounds in (self.unit_seconds, self.pitch, self.noise))
        lead, loudness, phase = rng.uniform(0, _LEAD_SECONDS), rng.uniform(0.2, 0.9), rng.uniform(0, 2 * np.pi)
        length = int((lead + units_of(text) * unit) * sampling_rate) + 1
        times = np.arange(length) / sampling_rate
        envelope, at = np.zeros(length), lead
        for on, units in _runs(text):
            if on:
                edges = np.minimum(times - at, at + units * unit - times) / _EDGE_SECONDS
                envelope += np.clip(edges, 0, 1)
            at += units * unit
        samples = noise * rng.standard_normal(length)
        if signal:
            samples += envelope * np.sin(2 * np.pi * pitch * times + phase)
        return (loudness * samples / np.abs(samples).max()).astype(np.float32)


def _runs(text: str) -> list[tuple[bool, int]]:
    """(tone or pause, units) of a text, without a pause at its end."""
    runs: list[tuple[bool, int]] = []
    for word in text.split(" "):
        for letter in word:
            for sign in _CODES[letter]:
                runs += [(True, 1 if sign == "." else 3), (False, 1)]
            # Three units between letters, seven between words; one of them is there already.
            runs[-1] = (False, 3)
        runs[-1] = (False, 7)
    return runs[:-1]
