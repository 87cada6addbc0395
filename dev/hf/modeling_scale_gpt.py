"""A scale-vector GPT for Transformers: a Llama with the Output-Norms and experts that a Llama has no place for.

train_gpt2 --export hf writes this file beside the weights of such a model:

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Scale vectors that stand right beside a linear map are folded into its weight, so Pre-Norms have none here. What is
left is gamma * Norm(W x) at the sites that config.json lists. There is no key/value cache: generating costs a forward
over the whole text a token.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput


class ScaleGPTConfig(PretrainedConfig):
    model_type = "scale_gpt"

    def __init__(self, vocab_size=256, hidden_size=128, intermediate_size=341, num_hidden_layers=4,
                 num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
                 rope_theta=10000.0, normed_sites=(), num_experts=0, num_experts_per_tok=0, expert_size=0,
                 shared_size=0, moe_norm=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.normed_sites = list(normed_sites)  # of q k v o gate up down head: those with an Output-Norm
        self.num_experts = num_experts  # 0: a dense FFN
        self.num_experts_per_tok = num_experts_per_tok
        self.expert_size = expert_size
        self.shared_size = shared_size  # hidden size of the shared expert; 0: none
        self.moe_norm = moe_norm  # an Output-Norm on the sum of the experts
        kwargs["use_cache"] = False
        super().__init__(**kwargs)


def norm(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class NormedLinear(nn.Linear):
    """y = gamma * Norm(W x), with a Norm for each of `groups` equal parts; y = W x where the site has no norm."""

    def __init__(self, config, site, cols, rows, groups=1):
        super().__init__(cols, rows, bias=False)
        self.groups, self.eps = groups, config.rms_norm_eps
        self.norm_weight = nn.Parameter(torch.ones(rows)) if site in config.normed_sites else None

    def forward(self, x):
        y = super().forward(x)
        if self.norm_weight is None:
            return y
        return self.norm_weight * norm(y.unflatten(-1, (self.groups, -1)), self.eps).flatten(-2)


def rope(x, theta):
    """Turns the pairs (x[i], x[i + half]) of each head by angles that grow with the position; x (B, heads, T, size)."""
    T, half = x.shape[-2], x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(T, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.size, self.theta = C // self.heads, config.rope_theta
        self.q_proj = NormedLinear(config, "q", C, self.heads * self.size, self.heads)
        self.k_proj = NormedLinear(config, "k", C, self.kv_heads * self.size, self.kv_heads)
        self.v_proj = NormedLinear(config, "v", C, self.kv_heads * self.size, self.kv_heads)
        self.o_proj = NormedLinear(config, "o", self.heads * self.size, C)

    def forward(self, x, visible):
        def heads(y, n):
            return y.unflatten(-1, (n, self.size)).transpose(1, 2)  # (B, n, T, size)
        q = rope(heads(self.q_proj(x), self.heads), self.theta)
        k = rope(heads(self.k_proj(x), self.kv_heads), self.theta)
        v = heads(self.v_proj(x), self.kv_heads)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        scores = (q @ k.transpose(-1, -2)) * self.size ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(-2))


class FFN(nn.Module):
    def __init__(self, config, size):
        super().__init__()
        self.gate_proj = NormedLinear(config, "gate", config.hidden_size, size)
        self.up_proj = NormedLinear(config, "up", config.hidden_size, size)
        self.down_proj = NormedLinear(config, "down", size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The shared expert plus the sum of a token's chosen experts, weighted by the softmax of their logits."""

    def __init__(self, config):
        super().__init__()
        self.chosen, self.eps = config.num_experts_per_tok, config.rms_norm_eps
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FFN(config, config.expert_size) for _ in range(config.num_experts))
        self.shared = FFN(config, config.shared_size) if config.shared_size else None
        self.norm_weight = nn.Parameter(torch.ones(config.hidden_size)) if config.moe_norm else None

    def forward(self, x):
        rows = x.flatten(0, 1)
        logits, chosen = self.router(rows).topk(self.chosen)
        weights = logits.softmax(-1)
        out = self.shared(rows) if self.shared else torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            out = out.index_add(0, token, weights[token, place, None] * expert(rows[token]))
        if self.norm_weight is not None:
            out = self.norm_weight * norm(out, self.eps)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = Experts(config) if config.num_experts else FFN(config, config.intermediate_size)

    def forward(self, x, visible):
        x = x + self.self_attn(norm(x, self.eps), visible)
        return x + self.mlp(norm(x, self.eps))


class ScaleGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ScaleGPTConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
        })
        self.lm_head = NormedLinear(config, "head", config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.model["embed_tokens"]

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        T = input_ids.shape[1]
        visible = torch.ones(T, T, dtype=torch.bool, device=input_ids.device).tril()
        if attention_mask is not None:  # a padding token sees itself: a softmax over nothing would be NaN
            visible = visible & attention_mask.bool()[:, None, None, :] | torch.eye(T, dtype=torch.bool, device=input_ids.device)
        x = self.model["embed_tokens"](input_ids)
        for block in self.model["layers"]:
            x = block(x, visible)
        logits = self.lm_head(norm(x, self.config.rms_norm_eps))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}
