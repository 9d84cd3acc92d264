"""Time of one frame: stop decision, 12 codes and the next backbone input: `python -m bench.bench_local_frame`.

The stop head is made to continue, so that every frame draws B x 12 codes; that is checked after the timed runs.
"""

import dataclasses
from functools import partial

import torch

from bench import harness
from bench.baselines_local_frame import TorchGraphFrame
from moss_kernels.local_frame_decode import LocalFrameDecoder, LocalFrameWeights, local_frame_decode_reference
from moss_kernels.sample_codebook import SamplingParams, SamplingState
from moss_kernels.testing.local_frame import LocalFrameOutputs, frame_state
from moss_kernels.testing.weights import LOCAL_FRAME_SIZES, local_frame_weights
from moss_runtime.observe.traffic import local_frame_bytes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
SAMPLING = {"": SamplingParams(), "/open": SamplingParams(top_k=0, top_p=1.0)}


class DecoderFrame:
    """A frame by `LocalFrameDecoder`, with the interface of `TorchGraphFrame`."""

    def __init__(
        self, decoder: LocalFrameDecoder, weights: LocalFrameWeights, hidden: torch.Tensor, state: SamplingState
    ) -> None:
        self._decoder, self.hidden, self._state = decoder, hidden, state
        self._outputs = LocalFrameOutputs.allocate(weights, len(hidden))
        self._row_map, self._active = _row_map(hidden), torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        self.codes, self.continues = self._outputs.codes, self._outputs.continues

    def run(self) -> None:
        """One frame."""
        required = ("codes", "continues", "feedback", "status")
        self._decode({name: getattr(self._outputs, name) for name in required})

    def run_for_logits(self) -> torch.Tensor:
        """One frame, and its logits [B, Q, V], which `run` does not store."""
        self._decode(self._outputs.arguments())
        return self._outputs.audio_logits

    def _decode(self, outputs: dict[str, torch.Tensor]) -> None:
        self._decoder.decode(self.hidden, self._state, self._row_map, self._active, **outputs)


@dataclasses.dataclass
class Bench:
    """Weights of one size, the same in float64, and a decoder with and one without the table (on a GPU)."""

    weights: LocalFrameWeights
    exact_weights: LocalFrameWeights
    decoders: dict[str, LocalFrameDecoder]

    @classmethod
    def make(cls, size: str, device: str) -> "Bench":
        weights = local_frame_weights(
            5, device=device, dtype=torch.bfloat16, **LOCAL_FRAME_SIZES[size], never_stop=True
        )
        decoders = {}
        if device == "cuda":
            decoders = {
                "cuda": LocalFrameDecoder(weights, max_batch=max(BATCHES)),
                "cuda_c_attn": LocalFrameDecoder(weights, max_batch=max(BATCHES), qkv_table=False),
            }
        return cls(weights, weights.to(torch.float64), decoders)

    def case(self, batch: int, sampling: str) -> harness.Case:
        """Two operations of each row for each weight that is read."""
        moved = local_frame_bytes(self.weights)
        flops = 2 * batch * moved // self.weights.c_proj_weight.element_size()
        conditions = {"dtype": "bfloat16", "l2": "what the frame before left", "sampling": str(SAMPLING[sampling])}
        return harness.Case(f"local_frame/B{batch}{sampling}", "us", moved, flops, 1, conditions)

    def frames(self, batch: int, sampling: str) -> dict[str, DecoderFrame | TorchGraphFrame]:
        """Implementations with states of their own; row b is request b."""
        weights = self.weights
        device = weights.c_proj_weight.device
        generator = torch.Generator().manual_seed(batch)
        hidden = torch.randn(batch, weights.c_proj_weight.shape[0], generator=generator).to(device, torch.bfloat16)

        def state() -> SamplingState:
            return frame_state(weights, batch, SAMPLING[sampling])

        frames = {
            name: DecoderFrame(decoder, weights, hidden, state())
            for name, decoder in self.decoders.items()
            if name == "cuda" or sampling == ""
        }
        return frames | {"torch_graph": TorchGraphFrame(weights, hidden, state(), _row_map(hidden))}

    def variants(self, batch: int, sampling: str) -> list[harness.Variant]:
        return [
            harness.Variant(name, frame.run, partial(self.check, frame), partial(self.check_codes, frame))
            for name, frame in self.frames(batch, sampling).items()
        ]

    def check(self, frame: DecoderFrame | TorchGraphFrame) -> None:
        """Raises AssertionError unless a frame's logits err at most twice as much as those of eager bf16."""
        got = frame.run_for_logits()
        self.check_codes(frame)
        hidden = frame.hidden
        active = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        exact, eager = (
            local_frame_decode_reference(
                hidden.to(weights.c_proj_weight.dtype), weights, None, None, active, teacher_codes=frame.codes
            ).audio_logits
            for weights in (self.exact_weights, self.weights)
        )
        error, allowed = ((logits - exact).square().mean((0, 2)).sqrt() for logits in (got, eager))
        assert (error <= 2 * allowed).all(), f"errors of the positions' logits {error}, those of eager bf16 {allowed}"

    def check_codes(self, frame: DecoderFrame | TorchGraphFrame) -> None:
        """Raises AssertionError unless every row continues with valid codes."""
        vocab = self.weights.audio_embeddings.shape[1]
        valid = (frame.codes >= 0) & (frame.codes < vocab)
        assert valid.all() and frame.continues.all(), f"{valid.sum()} of {valid.numel()} codes are valid"


def _row_map(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="batch sizes (%(default)s)")
    options = parser.parse_args()
    bench = Bench.make("tiny", "cpu") if options.smoke else Bench.make("full", "cuda")
    for sampling in SAMPLING:
        for batch in (1, 3) if options.smoke else options.batch:
            harness.bench(bench.case(batch, sampling), partial(bench.variants, batch, sampling), options)


if __name__ == "__main__":
    main()
