"""`verify`: runs a model and a codec the way serving does, eagerly and in graphs, and compares what comes out."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moss_kernels import SamplingParams, SamplingState
from moss_kernels.local_frame_decode import local_frame_decode_reference
from moss_kernels.sample_codebook import sample_codebook_reference
from moss_kernels.testing.local_frame import LocalFrameOutputs, clone_state
from moss_runtime.graphs.capture import GraphSet
from moss_runtime.graphs.clip_encoder import ClipEncoder
from moss_runtime.graphs.codec_chunk import CodecChunk
from moss_runtime.graphs.prefill import cut
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.graphs.speech import generate
from moss_runtime.model.codec import Codec
from moss_runtime.model.tts import Generation, MossTTS
from moss_runtime.verify.direct import call_the_rest
from moss_runtime.verify.ops import OpCheck
from moss_runtime.verify.results import Result, Results, compare

CHUNKS = (1, 2, 4, 8)
# Streaming may be so much further from float32 than offline decoding in the same dtype, and nobody is asked for more
# than the rounding of float32 allows.
MAX_SNR_LOSS_DB = 1.0
FLOAT32_DB = 110.0
# Of the codes of clips, so much smaller a share than of the eager encoder's may be as in float32, but never less than
# the second. From one that differs on, those of its frame do: in fewer bits it takes many frames to compare.
MAX_SHARE_LOSS, MIN_SHARE = 0.05, 0.2
CLIP_FRAMES, FLOAT32_CLIP_FRAMES = 250, 40


@dataclasses.dataclass(frozen=True)
class Spoken:
    """What a runtime made of some prompts. audio: [C, n] float32 of each."""

    results: list[Generation]
    audio: list[Tensor]


@torch.no_grad()
def verify(
    model: MossTTS,
    codec: Codec,
    prompts: Sequence[Tensor],
    *,
    frames: int = 12,
    progress: Callable[[str], None] = lambda stage: None,
) -> Results:
    """Compare every op, and every graph that a runtime of a few rows has, with its reference.

    On a CPU the ops are their references and nothing is captured: it compares the runtime with the model.

    Args:
        model: on the device and in the dtype to check.
        codec: likewise; with or without its encoder.
        prompts: at least one [T, 1+n_vq] int64 on the CPU.
        frames: most frames of each prompt.
        progress: called with the name of what begins.
    """
    results = Results()
    longest = max(map(len, prompts))
    limits = {"rows": len(prompts), "max_tokens": longest + frames, "max_frames": frames}
    runtime = Runtime(model, codec, chunks=CHUNKS, **limits)
    progress("operations")
    with OpCheck(results):
        eager = speak(runtime, prompts)
        call_the_rest(model, codec, prompts[0])
    progress("backbone and local transformer")
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    hidden = _check_backbone(runtime, prompts, results)
    _check_local_frame(runtime, hidden, results)
    on_gpu, joins = model.device.type == "cuda", len(prompts) > 1 and frames > 1
    # On a CPU what is rounded to fewer bits depends on the rows beside.
    if joins and (on_gpu or model.dtype == torch.float32):
        results.add(_same_codes("mixed step", "eager", join(runtime, prompts), eager.results))
    if model.dtype == torch.float32:
        # In fewer bits the model rounds in other places, and codes part for good at the first draw that is close.
        progress("frames")
        params = seeded(len(prompts))
        results.add(_same_codes("frames", "eager", eager.results, model.generate(prompts, params, max_frames=frames)))
    if on_gpu:
        progress("graphs")
        runtime.warm_up()
        spoken = speak(runtime, prompts)
        results.add(_same_codes("frames", "graph", spoken.results, eager.results))
        if joins:
            results.add(_same_codes("mixed step", "graph", join(runtime, prompts), eager.results))
            results.add(_replays("mixed", runtime.mixed.graphs))
        _check_replays(runtime, results)
        results.add(_check_audio(codec, spoken, "graph"))
    results.add(_check_audio(codec, eager, "eager"))
    if len(codec.encoder):
        progress("clip encoder")
        _check_clips(codec, results)
    return results


def seeded(count: int) -> list[SamplingParams]:
    """Sampling parameters of the prompts."""
    return [SamplingParams(seed=seed, repetition_penalty=1.1) for seed in range(count)]


def speak(runtime: Runtime, prompts: Sequence[Tensor]) -> Spoken:
    """What a runtime with a codec makes of prompts: [T, 1+n_vq] int64 each."""
    parts: list[list[Tensor]] = [[] for _ in prompts]
    results = generate(
        runtime, prompts, seeded(len(prompts)), on_audio=lambda index, audio: parts[index].append(audio.clone())
    )
    channels = runtime.feed.chunk.codec.config.channels
    return Spoken(results, [torch.cat([torch.zeros(channels, 0), *one], 1) for one in parts])


def join(runtime: Runtime, prompts: Sequence[Tensor]) -> list[Generation]:
    """What comes of prompts of which all but the first are prefilled beside a frame of that one."""
    params = seeded(len(prompts))
    leases = {0: runtime.add(0, prompts[0], params[0])}
    results: dict[int, Generation] = {}
    deltas = runtime.step()
    leases |= {index: runtime.add(index, prompts[index], params[index]) for index in range(1, len(prompts))}
    while leases:
        for delta in deltas:
            if delta.final:
                lease = leases.pop(delta.request_id)
                codes, seed = runtime.codes(lease), runtime.seed(lease)
                results[delta.request_id] = Generation(codes, seed, delta.finish_reason)
                runtime.release(lease)
        deltas = runtime.step()
        if not deltas:
            runtime.wait()
    return [results[index] for index in range(len(prompts))]


def _same_codes(name: str, implementation: str, actual: list[Generation], expected: list[Generation]) -> Result:
    """Codes, number of frames and end of each request."""
    codes, equal = 0, 0
    for one, other in zip(actual, expected, strict=True):
        count = min(len(one.codes), len(other.codes))
        codes += max(one.codes.numel(), other.codes.numel())
        equal += int((one.codes[:count].cpu() == other.codes[:count].cpu()).sum())
    ends = [[result.finish_reason for result in results] for results in (actual, expected)]
    failure = "" if ends[0] == ends[1] else f"requests ended by {ends[0]}, not {ends[1]}"
    if not codes:
        failure = "no frame was generated"
    return Result(name, implementation, codes=codes, equal=equal, failure=failure)


def _check_replays(runtime: Runtime, results: Results) -> None:
    """Graphs did the work: each kind was replayed, and none could not be captured."""
    results.add(_replays("frame", runtime.frame.graphs))
    results.add(_replays("prefill", runtime.prefill.graphs))
    results.add(_replays("codec_chunk", runtime.feed.chunk))


def _replays(name: str, graphs: GraphSet | CodecChunk) -> Result:
    failed = graphs.fallbacks["capture_failed"]
    failure = "" if graphs.replays and not failed else f"{failed} steps had no graph, which could not be captured"
    return Result(f"{name} replays", "graph", cases=graphs.replays, failure=failure)


def _check_backbone(runtime: Runtime, prompts: Sequence[Tensor], results: Results) -> Tensor:
    """Prefill and one step of all rows; the hidden states [B, H] that come out."""
    model, pool, kv, frame, prefill = runtime.model, runtime.pool, runtime.kv, runtime.frame, runtime.prefill
    leases = []
    for index, prompt in enumerate(prompts):
        params = seeded(len(prompts))[index]
        lease = pool.acquire(index, params, seed=params.seed, max_frames=1, position=len(prompt) - 1)
        leases.append(lease)
        kv.reserve(lease.row, len(prompt))
        for piece in cut(lease.row, prompt, prefill.piece):
            prefill.run([piece])
    frame.launch([lease.row for lease in leases])
    hidden = frame.step.buffers.normed[: len(leases)].clone()
    for lease in leases:
        pool.abort(lease)
        kv.release(lease.row)
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    exact, eager = (_last_hidden(one, prompts) for one in (copy.deepcopy(model).to(wider), model))
    results.add(Result("backbone", "eager", **compare(hidden, exact.double(), eager, model.dtype)))
    return hidden


def _last_hidden(model: MossTTS, prompts: Sequence[Tensor]) -> Tensor:
    """[B, H]. Hidden state of each prompt's last row by the eager model."""
    hidden = []
    for prompt in prompts:
        embeds = model.embed(prompt.to(model.device))[None]
        hidden.append(model.transformer(embeds, model.transformer.new_cache(1))[0, -1])
    return torch.stack(hidden)


def _check_local_frame(runtime: Runtime, hidden: Tensor, results: Results) -> None:
    """The kernel of the local transformer: its logits, and the codes that it draws from them."""
    decoder, config, weights = runtime.frame.decoder, runtime.model.config, runtime.model.frame_weights()
    if decoder is None:
        return
    batch, generator = len(hidden), torch.Generator().manual_seed(0)
    teacher = torch.randint(config.audio_vocab_size, (batch, config.n_vq), generator=generator).to(hidden.device)
    state = SamplingState.allocate(
        rows=batch, codebooks=config.n_vq, vocab=config.audio_vocab_size, device=hidden.device
    )
    for row, params in enumerate(seeded(batch)):
        state.set_row(row, params, seed=params.seed)
    row_map = torch.arange(batch, dtype=torch.int32, device=hidden.device)
    active = torch.ones(batch, dtype=torch.bool, device=hidden.device)
    outputs = LocalFrameOutputs.allocate(weights, batch)
    before = clone_state(state, "cpu")
    decoder.decode(hidden, state, row_map, active, teacher_codes=teacher, **outputs.arguments())
    exact, eager = (
        local_frame_decode_reference(
            hidden.to(one.stop_head.dtype), one, None, None, active, teacher_codes=teacher
        ).audio_logits
        for one in (weights.to(torch.float64), weights)
    )
    results.add(
        Result("local_frame_decode", "cuda", **compare(outputs.audio_logits, exact, eager, weights.stop_head.dtype))
    )
    for codebook in range(config.n_vq):
        drawn = _draw(outputs.audio_logits[:, codebook].cpu(), before, codebook, config.audio_pad_token_id)
        equal = int((drawn == outputs.codes[:, codebook].cpu()).sum())
        results.add(Result("local_frame_decode", "cuda", codes=batch, equal=equal))


def _draw(logits: Tensor, state: SamplingState, codebook: int, pad_id: int) -> Tensor:
    """[B] int64. What the reference draws of row b of a state on the CPU from logits [B, V]."""
    batch = len(logits)
    code, status = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32)
    parameters = (state.temperature, state.top_k, state.top_p, state.repetition_penalty, state.seed, state.frame)
    sample_codebook_reference(
        logits,
        torch.arange(batch, dtype=torch.int32),
        torch.ones(batch, dtype=torch.bool),
        *parameters,
        state.seen.clone(),
        codebook + 1,
        codebook,
        pad_id,
        code,
        status,
    )
    return code


def _check_audio(codec: Codec, spoken: Spoken, implementation: str) -> Result:
    """Streamed audio against offline decoding of the same codes in float32."""
    exact_codec = codec if codec.dtype == torch.float32 else copy.deepcopy(codec).float()
    samples, rate = codec.config.samples_per_frame, codec.config.sampling_rate
    noise, loss, signal, lengths, expected_lengths = 0.0, 0.0, 0.0, 0, 0
    for result, audio in zip(spoken.results, spoken.audio, strict=True):
        expected_lengths += len(result.codes) * samples
        lengths += audio.shape[1]
        if audio.shape[1] != len(result.codes) * samples or not len(result.codes):
            continue  # shows in the lengths
        codes = result.codes[None].to(codec.device)
        exact, offline = (one.decode(codes)[0].cpu().double() for one in (exact_codec, codec))
        signal += float(exact.square().sum())
        noise += float((audio.double() - exact).square().sum())
        loss += float((offline - exact).square().sum())
    allowed = max(loss, signal / 10 ** (FLOAT32_DB / 10)) * 10 ** (MAX_SNR_LOSS_DB / 10)
    note = f"{_decibels(signal, noise)} to float32 offline, at least {_decibels(signal, allowed)}; "
    note += f"{lengths / rate:.2f} s"
    failure = "" if lengths == expected_lengths else f"{lengths} samples, not {expected_lengths}"
    if not signal:
        failure = failure or "there was no audio to compare"
    count = codec.config.channels * max(lengths, 1)
    errors = {"error": (noise / count) ** 0.5, "bound": (allowed / count) ** 0.5}
    return Result("streamed audio", implementation, cases=len(spoken.audio), note=note, failure=failure, **errors)


def _check_clips(codec: Codec, results: Results) -> None:
    """Codes of two clips against those of the eager encoder, and of each alone against those beside the other."""
    config, on_gpu = codec.config, codec.device.type == "cuda"
    frames = FLOAT32_CLIP_FRAMES if codec.dtype == torch.float32 else CLIP_FRAMES
    encoder = ClipEncoder(codec, 2, lengths=(frames,))
    encoder.warm_up()
    generator, longest = torch.Generator().manual_seed(0), frames * config.samples_per_frame
    # The second ends in the middle of a frame.
    lengths = longest, longest - config.samples_per_frame // 2
    clips = [torch.rand(config.channels, length, generator=generator) - 0.5 for length in lengths]
    together = torch.cat(encoder(clips))
    alone = torch.cat([encoder([clip])[0] for clip in clips])
    exact_codec = codec if codec.dtype == torch.float32 else copy.deepcopy(codec).float()
    exact, eager = (torch.cat(one.encode(clips)).cpu() for one in (exact_codec, codec))
    share, expected = (float((codes == exact).double().mean()) for codes in (together, eager))
    note = f"{share:.1%} of the codes as in float32, of the eager encoder {expected:.1%}"
    errors = {"error": 1 - share, "bound": 1 - max(expected - MAX_SHARE_LOSS, MIN_SHARE)}
    same = {"codes": together.numel(), "equal": int((together == alone).sum())}
    results.add(Result("clip encoder", "graph" if on_gpu else "eager", cases=len(clips), note=note, **errors, **same))
    if on_gpu:
        results.add(_replays("clip encoder", encoder.graphs))


def _decibels(signal: float, noise: float) -> str:
    if not signal or not noise:
        return "exact" if signal else "no signal"
    return f"{10 * math.log10(signal / noise):.1f} dB"
