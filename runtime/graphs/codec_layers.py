"""A transformer stage of the codec over static buffers, as the chunk step and the clip encoder run it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moss_kernels.codec_linear import (
    codec_linear,
    leaves_normed,
    moments_size,
    normed_rows,
    partial_elements,
    partial_slices,
)
from moss_runtime.graphs.codec_weights import StageWeights


def front(buffer: Tensor, *shape: int) -> Tensor:
    """The first elements of a flat buffer as a tensor of a shape."""
    return buffer[: torch.Size(shape).numel()].view(shape)


class StageBuffers:
    """Static memory that all stages share; views of the front of each buffer serve fewer tokens.

    Attributes:
        streams: [2, n]. The residual stream of a stage is in one; the other is scratch for `codec_linear`, and in the
            end the residual stream of the next stage, if this one makes it.
        wide: input and output of a stage that are no residual stream; inside a layer q, k, v and the attention output,
            then the inner activations.
        partials: float32. Sums over slices that a linear leaves to what comes next: a norm, or the attention.
        moments: int32. What linears ask for that leave the next norm's rows.
    """

    def __init__(
        self,
        stages: Sequence[StageWeights],
        frames: int,
        *,
        dtype: torch.dtype,
        residual_dtype: torch.dtype,
        device: torch.device,
    ):
        """Allocates them for `frames` frames of all rows together; `dtype` is that of the weights."""

        def most(width_of_stage) -> int:
            return frames * max(stage.tokens_per_frame * width_of_stage(stage.config) for stage in stages)

        # The last stage's output is float32, twice the elements of a 16-bit buffer.
        wide = most(lambda c: max(c.input_size, 4 * c.d_model, c.feedforward_size, 2 * c.output_size))
        widths = most(lambda c: c.d_model)
        self.streams = torch.zeros(2, widths, dtype=residual_dtype, device=device)
        self.wide = torch.zeros(wide, dtype=dtype, device=device)
        sizes = [(frames * stage.tokens_per_frame, stage.config) for stage in stages]
        adding = [(m, c.d_model, k) for m, c in sizes for k in (c.d_model, c.feedforward_size)]
        linears = adding + [(m, 3 * c.d_model, c.d_model) for m, c in sizes]
        self.partials = torch.zeros(max(partial_elements(*linear) for linear in linears), device=device)
        rows = max(normed_rows(*linear) for linear in adding)
        self.moments = torch.zeros(moments_size(rows), dtype=torch.int32, device=device)

    def stream(self, index: int, *shape: int) -> Tensor:
        """The residual stream of stage `index`, of any shape."""
        return front(self.streams[index % 2], *shape)

    def scratch(self, index: int) -> Tensor:
        """What `codec_linear` asks for in stage `index`."""
        return self.streams[(index + 1) % 2].view(self.wide.dtype)

    def run(
        self,
        stage: StageWeights,
        x: Tensor,
        scratch: Tensor,
        out: Tensor,
        batch: int,
        tokens: int,
        attend: Callable[[int, Tensor, Tensor], None],
        *,
        cos_sin: Tensor | None,
        sliced: bool = False,
    ) -> None:
        """A transformer stage: its layers on its residual stream, and its output projection.

        Args:
            stage: weights.
            x: [B * T, d_model]. The stream.
            scratch: that of the stage, of the dtype of the weights.
            out: [B * T, n] for an `output_proj` [n, d_model], written in the end; may lie in `scratch` or `wide`.
            batch, tokens: rows, and tokens of each.
            attend: called with the number of a layer, its q, k, v [B, T, 3*H*D], and where its attention output goes,
                [B, T, H*D].
            cos_sin: [B, T, D/2, 2] float32. By which q and k are rotated before; None: `attend` does it.
            sliced: whether `attend` takes q, k, v as float32 sums over slices as well, [P, B, T, 3*H*D].
        """
        config, m = stage.config, batch * tokens
        d = config.d_model
        # A stream that is not of the dtype of the weights has no kernel that leaves slices.
        slices = partial_slices(m, stage.layers[0].in_proj["weight"]) if sliced and x.dtype == self.wide.dtype else 0
        shape = (batch, tokens, 3 * d)
        qkv = front(self.partials, slices, *shape) if slices else front(self.wide, *shape)
        attended = front(self.wide[m * 3 * d :], batch, tokens, d)
        hidden = front(self.wide, m, config.feedforward_size)
        cos_sin = None if cos_sin is None else cos_sin.view(m, -1, 2)

        def add(inputs: Tensor, linear: dict[str, Tensor], following: dict[str, Tensor] | None) -> dict[str, Tensor]:
            """Adds a linear to the stream; returns arguments of the one with a norm behind it, if there is one."""
            weight, common = linear["weight"], {"out": x, "scratch": scratch}
            if following is None:
                codec_linear(inputs, **linear, **common)
                return {}
            if leaves_normed(m, weight, x.dtype):
                normed = front(scratch, m, d)
                norm = {f"next_{name}": following[name] for name in ("norm_weight", "norm_bias")}
                codec_linear(inputs, **linear, **common, **norm, normed=normed, moments=self.moments)
                return {"x": normed, "weight": following["weight"]}
            if slices := partial_slices(m, weight):
                sums = front(self.partials, slices, m, d)
                codec_linear(inputs, weight, sums)
                return behind_norm(following) | {"partials": sums, "partials_scale": linear["scale"]}
            codec_linear(inputs, **linear, **common)
            return behind_norm(following)

        def behind_norm(linear: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"x": x, "scratch": scratch} | linear

        arguments = behind_norm(stage.layers[0].in_proj)
        for number, layer in enumerate(stage.layers):
            codec_linear(**arguments, out=qkv.flatten(-3, -2), cos_sin=cos_sin)
            attend(number, qkv, attended)
            arguments = add(attended.view(m, d), layer.out_proj, layer.linear1)
            codec_linear(**arguments, out=hidden, gelu=True)
            last = number == len(stage.layers) - 1
            arguments = add(hidden, layer.linear2, None if last else stage.layers[number + 1].in_proj)
        codec_linear(x, stage.output_proj, out)
