"""Makes `reference.wav`: three seconds of a sung vowel phrase, as a voice reference that is free of anyone's voice.

Run it as `python runtime/assets/make_reference.py` to write the file again.
"""

from pathlib import Path

import numpy as np

RATE = 24_000
SECONDS = 3.0
# Formant frequencies in Hz of the vowels, as commonly tabulated for a low voice.
VOWELS = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}
BANDWIDTHS = (80, 100, 140)
# (start in seconds, vowel, pitch in Hz) of each syllable.
SYLLABLES = (
    (0.10, "a", 131), (0.45, "o", 147), (0.80, "i", 165), (1.10, "e", 147),
    (1.45, "u", 131), (1.80, "a", 110), (2.15, "e", 123), (2.45, "o", 98),
)  # fmt: skip
END = 2.85


def phrase() -> np.ndarray:
    """Adds up the harmonics of a gliding voice, each as loud as the formants of the moment let it be.

    Returns:
        [n] float64. Peak 0.5, at 24 kHz.
    """
    time = np.arange(int(RATE * SECONDS)) / RATE
    starts = np.array([start for start, _, _ in SYLLABLES])
    glide = 0.06  # seconds from one vowel or pitch to the next
    knots = np.stack([starts - glide / 2, starts + glide / 2], axis=1).ravel()[1:]

    def track(values: list[float]) -> np.ndarray:
        return np.interp(time, knots, np.repeat(values, 2)[:-1])

    vibrato = 1 + 0.008 * np.sin(2 * np.pi * 5.2 * time)
    pitch = track([hertz for _, _, hertz in SYLLABLES]) * vibrato
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formants = [track([VOWELS[vowel][i] for _, vowel, _ in SYLLABLES]) for i in range(3)]

    voice = np.zeros_like(time)
    for harmonic in range(1, 41):
        frequency = harmonic * pitch
        loudness = sum(
            1 / (1 + ((frequency - formant) / width) ** 2) for formant, width in zip(formants, BANDWIDTHS, strict=True)
        )
        voice += (0.02 + loudness) / harmonic**0.5 * np.sin(harmonic * phase)

    since = time[:, None] - starts
    attack = np.clip(since / 0.03, 0, 1) * np.exp(-np.clip(since - 0.15, 0, None) * 8) * (since > 0)
    voice *= attack.max(axis=1) * np.clip((END - time) / 0.1, 0, 1)
    return 0.5 * voice / np.abs(voice).max()


if __name__ == "__main__":
    import torch

    from moss_runtime.audio import save_wav

    save_wav(Path(__file__).with_name("reference.wav"), torch.from_numpy(phrase())[None], RATE)
