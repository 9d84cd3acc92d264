"""One decode step of the backbone over static buffers and paged keys and values: what a frame graph holds."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from moss_kernels.backbone_linear import backbone_linear, interleave, split_count
from moss_kernels.paged_attention import AttentionScratch, paged_attention
from moss_kernels.rms_norm import rms_norm
from moss_runtime.model.backbone import Backbone, Layer, rope_tables


class Pages(Protocol):
    """Where keys and values lie.

    Attributes:
        key_pages, value_pages: [layers, P+1, H, Z, D]. P pages of Z tokens and the null page.
        page_table: [S+1, N] int32. Pages of each pool row.
    """

    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor


@dataclass(frozen=True)
class StepLayer:
    """Weights of a layer as the step reads them; the module's own are views of the packed ones.

    Attributes:
        input_norm, mlp_norm: [H].
        q_norm, k_norm: [D].
        qkv: [(Hq + 2*Hkv) * D, H]. Rows of q, of k, of v.
        o: [H, Hq*D].
        gate_up: [2*F, H]. Rows of the gate and of the up projection in turn.
        down: [H, F].
    """

    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def pack(cls, layer: Layer) -> "StepLayer":
        """Packs a layer's weights in place of its own: the module computes what it computed, in the same memory."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([linear.weight.detach() for linear in projections])
        parts = qkv.split([linear.weight.shape[0] for linear in projections])
        for linear, part in zip(projections, parts, strict=True):
            linear.weight = nn.Parameter(part, requires_grad=False)
        gate_up = interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())
        mlp.gate_proj.weight = nn.Parameter(gate_up[0::2], requires_grad=False)
        mlp.up_proj.weight = nn.Parameter(gate_up[1::2], requires_grad=False)
        return cls(
            input_norm=layer.input_layernorm.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            q_norm=attention.q_norm.weight.detach(),
            k_norm=attention.k_norm.weight.detach(),
            qkv=qkv,
            o=attention.o_proj.weight.detach(),
            gate_up=gate_up,
            down=mlp.down_proj.weight.detach(),
        )


class StepBuffers:
    """Static memory of a step; the front of each buffer serves smaller batches.

    Attributes:
        x: [max_batch, H]. Residual stream.
        normed: [max_batch, H]. Input of a linear, in the end the hidden state.
        qkv: [max_batch, (Hq + 2*Hkv) * D].
        attended: [max_batch, Hq*D].
        inner: [max_batch, F].
        partials: float32. What the linears into the residual stream leave to be summed.
        attention: scratch of the attention.
    """

    def __init__(self, backbone: Backbone, layer: StepLayer, max_batch: int):
        config, weight = backbone.config, layer.qkv

        def rows(width: int) -> Tensor:
            return torch.zeros(max_batch, width, dtype=weight.dtype, device=weight.device)

        self.x, self.normed = rows(config.hidden_size), rows(config.hidden_size)
        self.qkv = rows(len(layer.qkv))
        self.attended = rows(layer.o.shape[1])
        self.inner = rows(layer.down.shape[1])
        splits = max(split_count(*layer.o.shape), split_count(*layer.down.shape))
        self.partials = torch.zeros(splits * self.x.numel(), device=weight.device)
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.attention = AttentionScratch.allocate(max_batch, *heads, weight.device)


class BackboneStep:
    """The backbone for one new token of each row, in the ops of `moss_kernels`, without an allocation.

    On a GPU a row's hidden state is bitwise the same whatever the number of rows, its place and its neighbours. The
    eager module stays usable: its weights become views of the packed ones.

    Attributes:
        layers: packed weights.
        cos_sin: [max_position_embeddings, D]. Cosines of the D/2 pairs at each position, then their sines.
        buffers: static memory.
    """

    @torch.no_grad()
    def __init__(self, backbone: Backbone, *, max_batch: int):
        """Args: max_batch: most rows of a step, at least 1."""
        if max_batch < 1:
            raise ValueError(f"`max_batch` must be at least 1, got {max_batch}")
        config, self.backbone, self.max_batch = backbone.config, backbone, max_batch
        self.layers = [StepLayer.pack(layer) for layer in backbone.layers]
        self.buffers = StepBuffers(backbone, self.layers[0], max_batch)
        weight = self.layers[0].qkv
        positions = torch.arange(config.max_position_embeddings, device=weight.device)[None]
        tables = rope_tables(positions, config.head_dim, config.rope_theta, weight.dtype)
        self.cos_sin = torch.cat(tables, -1)[0, 0]

    @torch.no_grad()
    def step(self, embeds: Tensor, kv: Pages, positions: Tensor, row_map: Tensor, active: Tensor) -> Tensor:
        """Run one token of every row; stores its keys and values and does not advance `positions`.

        Args:
            embeds: [B, H] dtype of the weights, B at most `max_batch`. Input embeddings.
            kv: pages; those of the new tokens are reserved.
            positions: [S+1] int32. Tokens that each pool row holds.
            row_map: [B] int32. Pool row of each row; of padding the null row S.
            active: [B] bool. A row that is not stores nothing, and its output is arbitrary.

        Returns:
            [B, H]. Hidden states after the final norm: a view of a static buffer, which the next step overwrites.

        Raises:
            ValueError: more rows than `max_batch`, or a shape that does not fit; the message names the argument.
            TypeError: a dtype is wrong.

        Graph-safe: yes, on one stream.
        """
        batch, buffers, eps = len(embeds), self.buffers, self.backbone.config.rms_norm_eps
        if batch > self.max_batch:
            raise ValueError(f"`embeds` must have at most {self.max_batch} rows, got {batch}")
        x, normed = buffers.x[:batch], buffers.normed[:batch]
        qkv, attended, inner = buffers.qkv[:batch], buffers.attended[:batch], buffers.inner[:batch]
        # Launched plainly: what the kernels below read while those ahead of them still run is written before this.
        x.copy_(embeds)
        rms_norm(x, None, self.layers[0].input_norm, eps, normed)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.backbone.norm.weight.detach()]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            backbone_linear(normed, layer.qkv, qkv)
            self.attend(index, qkv, kv, positions, row_map, active, out=attended)
            self.end_layer(layer, next_norm, x, attended, inner, normed)
        return normed

    def attend(
        self, index: int, qkv: Tensor, kv: Pages, positions: Tensor, row_map: Tensor, active: Tensor, *, out: Tensor
    ) -> None:
        """Attention of a layer, enqueued right behind the linear that makes qkv [B, .]; the rest as in `step`.

        Args: index: of the layer. out: [B, Hq*D], written.
        """
        layer, eps = self.layers[index], self.backbone.config.rms_norm_eps
        rows = (kv.key_pages[index], kv.value_pages[index], kv.page_table, positions, row_map, active)
        token = qkv, layer.q_norm, layer.k_norm, eps, self.cos_sin
        paged_attention(*token, *rows, out, self.buffers.attention, settled=True)

    def end_layer(
        self, layer: StepLayer, next_norm: Tensor, x: Tensor, attended: Tensor, inner: Tensor, normed: Tensor
    ) -> None:
        """What follows a layer's attention: x [B, H] gets its output, normed [B, H] the norm of that for what is next.

        Args: next_norm: [H]. attended: [B, Hq*D]. inner: [B, F], overwritten.
        """
        eps = self.backbone.config.rms_norm_eps
        rms_norm(x, self._partials(attended, layer.o), layer.mlp_norm, eps, normed)
        backbone_linear(normed, layer.gate_up, inner, gate_up=True)
        rms_norm(x, self._partials(inner, layer.down), next_norm, eps, normed)

    def _partials(self, x: Tensor, weight: Tensor) -> Tensor:
        """[S, B, H] float32. A linear into the residual stream, in slices of its inputs."""
        shape = torch.Size((split_count(*weight.shape), len(x), len(weight)))
        partials = self.buffers.partials[: shape.numel()].view(shape)
        backbone_linear(x, weight, partials)
        return partials
