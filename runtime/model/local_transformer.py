"""Parameters of the local transformer under their official names; `moss_kernels.local_frame_decode` computes it."""

from torch import nn

from moss_runtime.model.config import LocalConfig


class Attention(nn.Module):
    """Packed q, k, v projection and output projection."""

    def __init__(self, config: LocalConfig):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)


class MLP(nn.Module):
    """Two matrices without a gate."""

    def __init__(self, config: LocalConfig):
        super().__init__()
        self.fc_in = nn.Linear(config.n_embd, config.n_inner)
        self.fc_out = nn.Linear(config.n_inner, config.n_embd)


class Block(nn.Module):
    """The one block."""

    def __init__(self, config: LocalConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)


class LocalTransformer(nn.Module):
    """Expands one backbone state into a frame. Holds parameters only."""

    def __init__(self, config: LocalConfig):
        super().__init__()
        self.h = nn.ModuleList([Block(config)])
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
