"""Generates Morse code as audio: training data for speech recognition that needs no recordings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# The code of recommendation ITU-R M.1677-1.
_TABLE = """
a .- b -... c -.-. d -.. e . f ..-. g --. h .... i .. j .--- k -.- l .-.. m -- n -. o --- p .--. q --.- r .-. s ... t -
u ..- v ...- w .-- x -..- y -.-- z --.. 0 ----- 1 .---- 2 ..--- 3 ...-- 4 ....- 5 ..... 6 -.... 7 --... 8 ---.. 9 ----.
"""
_SIGNS = _TABLE.split()
_CODES: dict[str, str] = dict(zip(_SIGNS[::2], _SIGNS[1::2], strict=True))
_EDGE_SECONDS = 0.004
"""Rise and fall time of a tone in seconds, which prevents clicks."""
_LEAD_SECONDS = 0.05
"""Maximum pause before the first tone in seconds."""


def num_time_units(text: str) -> int:
    """Returns the length in time units (a dot is 1, a dash is 3) of a text of letters, digits and single blanks."""
    return sum(length for _, length in _tone_runs(text))


@dataclass(frozen=True)
class MorseVoice:
    """Ranges from which the sound parameters of each row are drawn."""

    unit_seconds: tuple[float, float]
    pitch: tuple[float, float]
    """Minimum and maximum pitch in Hz."""
    noise: tuple[float, float]
    """Minimum and maximum standard deviation of the noise; tones have an amplitude of 1."""

    def speak(self, text: str, sampling_rate: int, rng: np.random.Generator, *, signal: bool = True) -> np.ndarray:
        """Returns the sound of a text as float32 samples in [-1, 1].

        Args:
            text: the text, made of letters, digits and single blanks.
            sampling_rate: number of samples per second.
            rng: random generator for speed, pitch, pause, loudness and noise.
            signal: False omits the tones, which gives the same noise without any signal.
        """
        unit, pitch, noise = (rng.uniform(*bounds) for bounds in (self.unit_seconds, self.pitch, self.noise))
        lead, loudness, phase = rng.uniform(0, _LEAD_SECONDS), rng.uniform(0.2, 0.9), rng.uniform(0, 2 * np.pi)
        length = int((lead + num_time_units(text) * unit) * sampling_rate) + 1
        times = np.arange(length) / sampling_rate
        envelope, start_seconds = np.zeros(length), lead
        for on, units in _tone_runs(text):
            if on:
                edges = np.minimum(times - start_seconds, start_seconds + units * unit - times) / _EDGE_SECONDS
                envelope += np.clip(edges, 0, 1)
            start_seconds += units * unit
        samples = noise * rng.standard_normal(length)
        if signal:
            samples += envelope * np.sin(2 * np.pi * pitch * times + phase)
        return (loudness * samples / np.abs(samples).max()).astype(np.float32)


def _tone_runs(text: str) -> list[tuple[bool, int]]:
    """Returns the sequence of (True for a tone, time units) of a text, without the pause at its end."""
    runs: list[tuple[bool, int]] = []
    for word in text.split(" "):
        for letter in word:
            for sign in _CODES[letter]:
                runs += [(True, 1 if sign == "." else 3), (False, 1)]
            # The pause is three units between letters and seven between words. One unit is already included.
            runs[-1] = (False, 3)
        runs[-1] = (False, 7)
    return runs[:-1]
