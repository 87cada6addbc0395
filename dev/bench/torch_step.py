"""One training step of the same GPT in PyTorch, for dev/bench/bench.c to compare with.

Speaks a small protocol over pipes, so that its steps can be interleaved with ours in one run: it prints a line
"ready ..." once the model has warmed up, and then answers each line "go" with a line "SECONDS LOSS PAGE_FAULTS", and
"quit" or the end of its input by leaving. Between the lines it sleeps in a read.

Written as a good user of PyTorch would for speed on a CPU: one matrix for q, k, v and one for gate, up; fused functions
(scaled_dot_product_attention, rms_norm, fused AdamW) where the installed version has them; and of the forms of AdamW
that it has, the one that is fastest here. Works from version 1.13 on. No torch.compile: it needs a compiler at run
time, and 1.13 lacks it.
"""
import argparse
import math
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

NORM_EPS = 1e-5
ROPE_THETA = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, (x.size(-1),), self.gamma, NORM_EPS)
        return self.gamma * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads, self.head_size, self.hidden = cfg.heads, cfg.channels // cfg.heads, cfg.hidden
        self.norm1, self.norm2 = RMSNorm(cfg.channels), RMSNorm(cfg.channels)
        self.qkv = nn.Linear(cfg.channels, 3 * cfg.channels, bias=False)
        self.o = nn.Linear(cfg.channels, cfg.channels, bias=False)
        self.gate_up = nn.Linear(cfg.channels, 2 * cfg.hidden, bias=False)
        self.down = nn.Linear(cfg.hidden, cfg.channels, bias=False)
        for layer in (self.qkv, self.o, self.gate_up, self.down):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (self.o, self.down):
            layer.weight.data /= math.sqrt(2 * cfg.layers)

    def attention(self, q, k, v, mask):
        """Causal attention over (B, NH, T, HS)."""
        if hasattr(F, "scaled_dot_product_attention"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        B, NH, T, HS = q.shape
        q, k, v = (x.reshape(B * NH, T, HS) for x in (q, k, v))
        # mask, scale and product in one pass over the scores
        scores = torch.baddbmm(mask.expand(B * NH, T, T), q, k.transpose(1, 2), alpha=1 / math.sqrt(HS))
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(B, NH, T, HS)

    def forward(self, x, cosine, sine, mask):
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, self.head_size).permute(2, 0, 3, 1, 4)
        first, second = qkv[:2].chunk(2, dim=-1)  # RoPE on q and k together: pairs (i, i + HS/2)
        q, k = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).unbind(0)
        y = self.attention(q, k, qkv[2], mask).transpose(1, 2).reshape(B, T, C)
        x = x + self.o(y)
        gate, up = self.gate_up(self.norm2(x)).split(self.hidden, dim=-1)
        return x + self.down(F.silu(gate) * up)


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embedding = nn.Embedding(cfg.vocab, cfg.channels)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.channels)
        self.head = nn.Linear(cfg.channels, cfg.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        half = cfg.channels // cfg.heads // 2
        angles = torch.outer(torch.arange(cfg.seq_len), ROPE_THETA ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        self.register_buffer("mask", torch.full((1, cfg.seq_len, cfg.seq_len), -math.inf).triu(1))

    def forward(self, inputs, targets):
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine, self.mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def optimizers(model, lr):
    """The forms of AdamW that this version has: name -> optimizer."""
    found = {}
    for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("for-loop", {"foreach": False})):
        try:
            found[name] = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **options)
        except (TypeError, RuntimeError):
            pass
    return found


def train_step(model, optimizer, inputs, targets):
    """Returns seconds and loss."""
    begin = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return time.perf_counter() - begin, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in dict(layers=12, channels=768, heads=12, hidden=2048, vocab=50257, batch=4, seq_len=64, threads=1).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-4)
    cfg = parser.parse_args()
    torch.set_num_threads(cfg.threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(1)
    model = GPT(cfg)
    tokens = torch.randint(cfg.vocab, (cfg.batch, cfg.seq_len + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    # Warm-up: one step's gradients, then two updates with each form of AdamW (the first one allocates): keep the fastest.
    first_loss = model(inputs, targets)
    first_loss.backward()
    took = {}
    for form, optimizer in optimizers(model, cfg.lr).items():
        for _ in range(2):
            begin = time.perf_counter()
            optimizer.step()
            took[form] = time.perf_counter() - begin
        optimizer.state.clear()
    name = min(took, key=took.get)
    optimizer = optimizers(model, cfg.lr)[name]
    first_loss = first_loss.item()
    train_step(model, optimizer, inputs, targets)
    print(f"ready {first_loss:.4f} PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {name} AdamW", flush=True)
    while sys.stdin.readline().strip() == "go":
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds, loss = train_step(model, optimizer, inputs, targets)
        print(f"{seconds:.6f} {loss:.4f} {resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}", flush=True)


if __name__ == "__main__":
    main()
