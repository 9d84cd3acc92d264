"""`LocalFrameDecoder`: the persistent CUDA kernel with its packed weights, table and workspace."""

import ctypes
import dataclasses

import torch
from torch import Tensor

from moss_kernels import _checks, _library
from moss_kernels.sample_codebook import SamplingState

from .cuda_kernel import CODEBOOKS, MAX_BATCH, MODELS, LocalFrameDecodeParams, LocalFramePackParams, library
from .reference import LocalFrameWeights

_OP = "local_frame_decode"
_COUNTER_BYTES = 256
# What the kernel reads unpacked.
_VECTORS = (
    "ln_1_weight",
    "ln_1_bias",
    "ln_2_weight",
    "ln_2_bias",
    "ln_f_weight",
    "ln_f_bias",
    "c_attn_bias",
    "c_proj_bias",
    "fc_in_bias",
    "fc_out_bias",
    "stop_head",
    "embed_tokens",
)


class LocalFrameDecoder:
    """Decodes frames of one local transformer: stop decision, 12 codes and the next backbone input in one launch.

    The kernel streams each weight once per position, whatever the batch, and gives a row the same bits whatever the
    batch size, its place, its neighbours and the number of multiprocessors. LayerNorm outputs, the inner activations,
    q, k, v and the attention output are bf16; sums, the residual and the logits stay fp32, so it rounds less often
    than eager PyTorch.

    One decoder belongs to one stream or live graph at a time, since launches share its workspace.

    Attributes:
        workspace: [bytes] uint8. The kernel's scratch memory; the first 256 bytes are its counters.
        qkv_table: [11, V, 3*H] bf16 or None. q and k (rotated) and v of every code.
    """

    def __init__(
        self,
        weights: LocalFrameWeights,
        *,
        max_batch: int = MAX_BATCH,
        qkv_table: bool = True,
        multiprocessors: int | None = None,
    ) -> None:
        """Packs the weights and builds the table.

        Args:
            weights: bf16, on one CUDA device, of a size that the kernel is built for.
            max_batch: largest batch that will be decoded, 1..128.
            qkv_table: look q, k and v up (165 MiB at full size) instead of running c_attn at each position. Same bits.
            multiprocessors: blocks of a launch; None for 128, or all that the device has. Fewer leave room for other
                work on the card, but a batch needs at least one for 8 rows, and the table 8. Same bits.

        Raises:
            NotImplementedError: No kernel for these dimensions or this device.
            TypeError: Weights that are not bf16.
            ValueError: Weights that are not on CUDA, or an argument out of range.
        """
        embeddings = weights.audio_embeddings
        if not isinstance(embeddings, Tensor):
            embeddings = torch.stack(tuple(embeddings))
        self._embeddings = embeddings.contiguous()
        codebooks, vocab, hidden = embeddings.shape
        inner = weights.fc_in_weight.shape[0]
        size = (hidden, inner, weights.n_head, vocab)
        if size not in MODELS or codebooks != CODEBOOKS:
            raise NotImplementedError(
                f"`{_OP}`: the CUDA kernel supports (hidden, inner, heads, vocab) in {sorted(MODELS)} with {CODEBOOKS} "
                f"codebooks, got {size} with {codebooks}"
            )
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"`{_OP}`: `max_batch` must be in 1 .. {MAX_BATCH}, got {max_batch}")
        device = embeddings.device
        if device.type != "cuda":
            raise ValueError(f"`{_OP}`: `weights` must be on a CUDA device, got {device}")
        self._weights = {name: getattr(weights, name).contiguous() for name in _VECTORS}
        for name, tensor in (*self._weights.items(), ("audio_embeddings", self._embeddings)):
            _checks.require_dtype(_OP, name, tensor, torch.bfloat16)
            _checks.require_device(_OP, name, tensor, device)
        self._max_batch, self._hidden, self._vocab, self._device = max_batch, hidden, vocab, device
        self._rope = _rope_table(hidden // weights.n_head, weights.rope_base, device)
        model = MODELS[size]
        with torch.cuda.device(device):
            self._packed = _pack(weights, self._embeddings, model)
            self.workspace = torch.zeros(
                library().moss_local_frame_workspace_bytes(model), dtype=torch.uint8, device=device
            )
            self.initialise_workspace()
            self._params = LocalFrameDecodeParams(
                struct_size=ctypes.sizeof(LocalFrameDecodeParams),
                abi_version=_library.ABI_VERSION,
                model=model,
                multiprocessors=multiprocessors or 0,
                audio_pad_id=weights.audio_pad_token_id,
                slot_id=weights.audio_assistant_slot_token_id,
                pad_token_id=weights.pad_token_id,
                text_rows=weights.embed_tokens.shape[0],
                layer_norm_epsilon=weights.layer_norm_epsilon,
                packed=self._packed.data_ptr(),
                audio_embeddings=self._embeddings.data_ptr(),
                rope=self._rope.data_ptr(),
                workspace=self.workspace.data_ptr(),
                **{name: tensor.data_ptr() for name, tensor in self._weights.items()},
            )
            self.qkv_table = self._build_table() if qkv_table else None

    def _build_table(self) -> Tensor:
        table = torch.empty(CODEBOOKS - 1, self._vocab, 3 * self._hidden, dtype=torch.bfloat16, device=self._device)
        self._params.stream = torch.cuda.current_stream(self._device).cuda_stream
        _library.check_status(library().moss_local_qkv_table(ctypes.byref(self._params), table.data_ptr()))
        self._params.qkv_table = table.data_ptr()
        return table

    def initialise_workspace(self) -> None:
        """Fill the workspace, but for its counters, as a first frame must find it: NaN, which no result may show."""
        self.workspace[_COUNTER_BYTES:] = 0xFF

    def decode(
        self,
        hidden: Tensor,
        state: SamplingState,
        row_map: Tensor,
        active: Tensor,
        *,
        codes: Tensor,
        continues: Tensor,
        feedback: Tensor,
        status: Tensor,
        teacher_codes: Tensor | None = None,
        stop_logits: Tensor | None = None,
        audio_logits: Tensor | None = None,
        hidden_out: Tensor | None = None,
    ) -> None:
        """Decodes one frame of B rows; the semantics are those of `local_frame_decode_reference`.

        Args:
            hidden: [B, H] bf16. Last hidden state of the backbone.
            state: parameters and history of the requests; of rows that continue `seen` and `frame` are updated.
            row_map: [B] int32. Row of `state` of each batch row; active rows name distinct rows.
            active: [B] bool. Inactive rows get pad outputs and their state keeps every bit.
            codes: [B, 12] int64, written. Pad ids in rows that do not continue.
            continues: [B] bool, written. The row is active and drew "continue".
            feedback: [B, H] bf16, written. Input embedding of the next backbone step.
            status: [B] int32, written. Status bits of the row's draws, or-ed; 0 in inactive rows.
            teacher_codes: [B, 12] int64. Fed to the following positions (and `feedback`) in place of the drawn codes,
                which `codes` still gets; every active row continues.
            stop_logits: [B, 2] float32, written in active rows.
            audio_logits: [B, 12, V] float32, written in rows that continue.
            hidden_out: [B, 12, H] bf16, written in rows that continue.

        Raises:
            ValueError: A shape, layout or device is wrong.
            TypeError: A dtype is wrong.

        Graph-safe: yes.
        """
        sizes = {"H": self._hidden, "V": self._vocab}
        tensors = {
            "hidden": (hidden, "[B, H]", torch.bfloat16),
            "row_map": (row_map, "[B]", torch.int32),
            "active": (active, "[B]", torch.bool),
            "codes": (codes, "[B, 12]", torch.int64),
            "continues": (continues, "[B]", torch.bool),
            "feedback": (feedback, "[B, H]", torch.bfloat16),
            "status": (status, "[B]", torch.int32),
            "teacher_codes": (teacher_codes, "[B, 12]", torch.int64),
            "stop_logits": (stop_logits, "[B, 2]", torch.float32),
            "audio_logits": (audio_logits, "[B, 12, V]", torch.float32),
            "hidden_out": (hidden_out, "[B, 12, H]", torch.bfloat16),
        }
        params = self._params
        for name, (tensor, layout, dtype) in tensors.items():
            if tensor is not None:
                _checks.require_shape(_OP, name, tensor, layout, sizes)
                _checks.require_dtype(_OP, name, tensor, dtype)
                _checks.require_device(_OP, name, tensor, self._device)
                _checks.require_contiguous(_OP, name, tensor)
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        if not 1 <= hidden.shape[0] <= self._max_batch:
            raise ValueError(f"`{_OP}`: `hidden` must have 1 .. {self._max_batch} rows, got {hidden.shape[0]}")
        params.batch, params.pool_rows = hidden.shape[0], state.seed.shape[0]
        for field in dataclasses.fields(state):
            name, tensor = field.name, getattr(state, field.name)
            _checks.require_device(_OP, name, tensor, self._device)
            setattr(params, name, tensor.data_ptr())
        params.stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            _library.check_status(library().moss_local_frame_decode(ctypes.byref(params)))


def _rope_table(head_dim: int, base: float, device: torch.device) -> Tensor:
    """[12, D/2, 2] float32: cos and sin of each position, rounded to bf16 as the model rounds them."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(CODEBOOKS, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / base**exponents)
    return torch.stack((angles.cos(), angles.sin()), -1).to(torch.bfloat16).float().contiguous()


def _pack(weights: LocalFrameWeights, embeddings: Tensor, model: int) -> Tensor:
    packed = torch.empty(library().moss_local_frame_packed_bytes(model), dtype=torch.uint8, device=embeddings.device)
    matrices = ("c_attn", "c_proj", "fc_in", "fc_out")
    sources = {name: getattr(weights, f"{name}_weight").contiguous() for name in matrices}
    sources["audio_embeddings"] = embeddings
    for name, tensor in sources.items():
        _checks.require_dtype(_OP, name, tensor, torch.bfloat16)
        _checks.require_device(_OP, name, tensor, embeddings.device)
    params = LocalFramePackParams(
        struct_size=ctypes.sizeof(LocalFramePackParams),
        abi_version=_library.ABI_VERSION,
        model=model,
        packed=packed.data_ptr(),
        stream=torch.cuda.current_stream(embeddings.device).cuda_stream,
        **{name: tensor.data_ptr() for name, tensor in sources.items()},
    )
    _library.check_status(library().moss_local_frame_pack(ctypes.byref(params)))
    return packed
