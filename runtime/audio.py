"""Audio files in and out: any common format and rate in, WAV out."""

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from moss_runtime.errors import AudioError, UserError
from moss_runtime.files import replacing
from moss_runtime.optional import require

MIN_RATE, MAX_RATE = 8_000, 192_000
SUBTYPES = ("PCM_16", "FLOAT")
# Programs that write a WAV to a pipe cannot go back to fill in the length; they leave a value in this range.
UNKNOWN_LENGTH = 0x7FFFF000


def load_audio(path: str | Path, *, sampling_rate: int = 48_000, channels: int = 2, downmix: bool = False) -> Tensor:
    """Reads WAV, FLAC, OGG, MP3 or another format that libsndfile knows.

    Args:
        path: the file.
        sampling_rate: wished rate in Hz; the audio is resampled (soxr, high quality) when the file has another.
        channels: wished channels, 1 or 2. Mono becomes equal channels; stereo becomes mono as the mean.
        downmix: takes files of more than two channels as the mean of all their channels; otherwise they are refused.

    Returns:
        [channels, n] float32. Full scale is 1.

    Raises:
        AudioError: no such file, not audio, truncated, empty, rate outside 8 .. 192 kHz, more than two channels
            without `downmix`, or samples that are not finite.
        ValueError: `sampling_rate` or `channels` is out of range.
    """
    if channels not in (1, 2):
        raise ValueError(f"load_audio: `channels` must be 1 or 2, got {channels!r}")
    if not isinstance(sampling_rate, int) or not 1 <= sampling_rate <= MAX_RATE:
        raise ValueError(f"load_audio: `sampling_rate` must be an integer in 1..{MAX_RATE}, got {sampling_rate!r}")
    soundfile = require("soundfile", "reading and writing audio")
    path = Path(path)
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long or a parent may not be read
        raise AudioError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
    try:
        with soundfile.SoundFile(path) as file:
            rate, expected, file_format = file.samplerate, file.frames, file.format
            if not MIN_RATE <= rate <= MAX_RATE:
                raise AudioError(f"{path}: sampling rate must be {MIN_RATE} .. {MAX_RATE} Hz, got {rate}")
            if file.channels > 2 and not downmix:
                raise AudioError(f"{path}: has {file.channels} channels; ask for a downmix to use more than two")
            samples = file.read(dtype="float32", always_2d=True)
    except OSError as error:
        raise AudioError(f"{path}: cannot be read ({error.strerror})") from None
    except (RuntimeError, TypeError) as error:  # libsndfile's errors; TypeError for headerless formats
        raise AudioError(f"{path}: not readable as audio, or damaged ({_last_part(error)})") from None
    except MemoryError:  # a damaged header may claim any length
        raise AudioError(f"{path}: damaged, or too long for the memory: claims {expected} samples") from None
    if len(samples) < expected or _ends_early(path, file_format):
        raise AudioError(f"{path}: the file is truncated")
    if len(samples) == 0:
        raise AudioError(f"{path}: holds no audio")

    audio = torch.from_numpy(samples).T
    if not audio.isfinite().all():
        raise AudioError(f"{path}: holds samples that are not finite numbers")
    if len(audio) not in (1, channels):
        audio = audio.mean(dim=0, keepdim=True)
    if rate != sampling_rate:
        resampled = require("soxr", "resampling audio").resample(audio.T.numpy(), rate, sampling_rate)
        audio = torch.from_numpy(resampled).T
        if audio.shape[1] == 0:
            raise AudioError(f"{path}: {len(samples)} samples at {rate} Hz are less than one at {sampling_rate} Hz")
    return audio.expand(channels, -1).contiguous()


@contextlib.contextmanager
def wav_writer(
    path: str | Path, sampling_rate: int, channels: int, subtype: str = "PCM_16"
) -> Iterator[Callable[[Tensor], None]]:
    """Writes a WAV file piece by piece; it appears under its name, complete, when the block ends well.

    Args:
        path: the file; an older one is replaced.
        sampling_rate: in Hz.
        channels: number of channels.
        subtype: "PCM_16" (values beyond full scale are clipped) or "FLOAT".

    Yields:
        A function that appends `audio: [channels, n] float`, full scale 1.

    Raises:
        AudioError: unknown subtype; from the function: wrong shape or dtype, or samples that are not finite.
        UserError: the path cannot be written, or its suffix is another.
    """
    if subtype not in SUBTYPES:
        raise AudioError(f"subtype must be one of {', '.join(SUBTYPES)}, got {subtype!r}")
    soundfile = require("soundfile", "reading and writing audio")

    def write(audio: Tensor) -> None:
        if audio.ndim != 2 or len(audio) != channels:
            raise AudioError(f"audio must be [{channels}, n], got {tuple(audio.shape)}")
        if not audio.is_floating_point():
            raise AudioError(f"audio must be floating point with full scale 1, got {audio.dtype}")
        audio = audio.detach().to("cpu", torch.float32)
        if not audio.isfinite().all():
            raise AudioError("audio must be finite, got NaN or infinite samples")
        if subtype == "PCM_16":
            audio = (audio * 32768).round().clamp(-32768, 32767).to(torch.int16)
        file.write(audio.T.contiguous().numpy())

    try:
        with (
            replacing(path, ".wav") as partial,
            soundfile.SoundFile(partial, "w", sampling_rate, channels, subtype, format="WAV") as file,
        ):
            yield write
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: cannot be written ({_last_part(error)})") from None


def save_wav(path: str | Path, audio: Tensor, sampling_rate: int, subtype: str = "PCM_16") -> None:
    """Writes a WAV file that appears complete or not at all.

    Args:
        path: the file; an older one is replaced.
        audio: [C, n] float. Full scale is 1.
        sampling_rate: in Hz.
        subtype: "PCM_16" (values beyond full scale are clipped) or "FLOAT".

    Raises:
        AudioError: wrong shape or dtype, samples that are not finite, unknown subtype.
        UserError: the path cannot be written, or its suffix is another.
    """
    if audio.ndim != 2:
        raise AudioError(f"audio must be [C, n], got {tuple(audio.shape)}")
    with wav_writer(path, sampling_rate, len(audio), subtype) as write:
        write(audio)


def _ends_early(path: Path, file_format: str) -> bool:
    """Finds the truncation that libsndfile passes over: it takes the length of WAV and OGG from what is there."""
    if file_format in ("WAV", "WAVEX"):
        return _wav_ends_early(path)
    if file_format == "OGG":
        return _ogg_ends_early(path)
    return False


def _wav_ends_early(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:
        order = ">" if file.read(12)[:4] == b"RIFX" else "<"
        while len(header := file.read(8)) == 8:
            name, length = struct.unpack(order + "4sI", header)
            if name == b"data":
                return length < UNKNOWN_LENGTH and file.tell() + length > size
            file.seek(length + length % 2, 1)
    return True


def _ogg_ends_early(path: Path) -> bool:
    """A complete stream's last page carries the end-of-stream flag and all of its segments."""
    largest_page = 27 + 255 + 255 * 255
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - largest_page))
        tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27 or not page[5] & 4:
        return True
    segments = page[27 : 27 + page[26]]
    return len(segments) < page[26] or len(page) < 27 + len(segments) + sum(segments)


def _last_part(error: Exception) -> str:
    """The reason without the path that libsndfile puts before it."""
    return str(error).rsplit(": ", 1)[-1].rstrip(".")
