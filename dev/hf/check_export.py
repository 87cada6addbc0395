"""Do exported models give the same logits in Transformers? make check-export runs it; only Transformers' users need it.

Trains a small model of each variant for a few steps, exports it, loads it with AutoModelForCausalLM and compares the
logits of three prompts with ours. Then the other way: checkpoints that Transformers wrote are imported, compared,
exported again, and must be the same tensors. Exit status 1: something differs.
"""

import os
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TRAIN, LOGITS, SYNTH = "./train_gpt2", "build/hf_logits", "data/synth"
TOLERANCE = 1e-4
VOCAB = 512
SIZES = f"--layers 2 --channels 32 --heads 4 --seq-len 64 --vocab {VOCAB} --batch 4 --steps 20 --lr 2e-2 --val-data none"
EXPERTS = "--experts 6 --top-k 2"
VARIANTS = {  # flags, and whether the model needs code of its own
    "noscale": ("--variant noscale", False),
    "baseline": ("", False),
    "baseline, tied": ("--tie-embeddings on", False),
    "hg": ("--variant hg", False),
    "hg, tied": ("--variant hg --tie-embeddings on", False),
    "noscale, tied": ("--variant noscale --tie-embeddings on", False),
    "ap": ("--variant ap", False),
    "dp": ("--variant dp", False),
    "dp at every site": ("--placement q=dp,k=dp,v=dp,o=dp,gate=dp,up=dp,down=dp,head=dp", False),
    "or": ("--variant or", False),
    "er": ("--variant er", False),
    "hg+dp+or, 2 kv heads": ("--variant hg+dp+or --kv-heads 2", False),
    "dnp": ("--variant dnp", True),
    "unified": ("--variant unified", True),
    "unified, tied": ("--variant unified --tie-embeddings on", True),
    "unified, 1 kv head": ("--variant unified --kv-heads 1", True),
    "dnp at some sites": ("--placement q=dnp,k=dnp,o=dnp,down=dnp,head=dp", True),
    "qk-norm": ("--qk-norm on", True),
    "qk-norm+post-norm": ("--qk-norm on --post-norm on", True),
    "qk-norm+post-norm, noscale": ("--qk-norm on --post-norm on --variant noscale", True),
    "MoE": (EXPERTS, True),
    "MoE, no shared expert, post-norm": (EXPERTS + " --shared-hidden 0 --post-norm on", True),
    "MoE, unified, post-norm": (EXPERTS + " --variant unified --post-norm on", True),
    "MoE, dnp at down": (EXPERTS + " --variant hg --placement gate=dp,down=dnp", True),
}
generator = np.random.default_rng(1)
PROMPTS = [generator.integers(0, VOCAB, n).tolist() for n in (1, 17, 64)]


def run(command):
    result = subprocess.run(command, shell=True, capture_output=True)
    if result.returncode != 0:
        sys.exit(f"{command}\n{result.stderr.decode()}")
    return result.stdout


def difference(source, model):
    """The largest difference of logits, and the largest logit."""
    text = "\n".join(" ".join(map(str, prompt)) for prompt in PROMPTS) + "\n"
    result = subprocess.run([LOGITS, *source], input=text.encode(), capture_output=True)
    if result.returncode != 0:
        sys.exit(result.stderr.decode())
    ours = np.frombuffer(result.stdout, np.float32).reshape(-1, VOCAB)
    with torch.no_grad():
        theirs = np.concatenate([model(torch.tensor([prompt])).logits[0].float().numpy() for prompt in PROMPTS])
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.abs(ours - theirs).max()), float(np.abs(ours).max())


failures = 0


def report(name, worst, largest, good=True, note=""):
    global failures
    good = good and worst <= TOLERANCE and largest > 0.1  # logits near 0 would agree whatever happens
    failures += not good
    print(f"{'ok    ' if good else 'FAILED'} {name:34} largest difference {worst:.1e}, largest logit {largest:.2f}{note}", flush=True)


def check_export(folder, name, flags, own_code):
    out, exported = f"{folder}/run", f"{folder}/exported"
    run(f"rm -rf {out} {exported}")
    run(f"{TRAIN} {SIZES} {flags} --data '{folder}/data/synth_train_*.bin' --out {out}")
    run(f"{TRAIN} --resume {out} --export hf {exported}")
    if own_code != os.path.exists(f"{exported}/modeling_scale_gpt.py"):
        sys.exit(f"{name}: expected {'' if own_code else 'no '}modeling_scale_gpt.py")
    model, info = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=own_code, output_loading_info=True)
    clean = not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    model.eval()
    prompt = torch.tensor([PROMPTS[1]])
    torch.manual_seed(0)
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    clean = clean and text.shape[1] == prompt.shape[1] + 3 and int(text[0, len(PROMPTS[1])]) == int(model(prompt).logits[0, -1].argmax())
    padded = model(torch.cat((torch.zeros(1, 5, dtype=torch.long), prompt), 1), attention_mask=torch.tensor([[0] * 5 + [1] * prompt.shape[1]]),
                   position_ids=torch.tensor([[0] * 5 + list(range(prompt.shape[1]))]))
    clean = clean and float((padded.logits[0, 5:] - model(prompt).logits[0]).detach().abs().max()) <= TOLERANCE
    report(name, *difference(["--resume", out], model), clean, "" if clean else f", {info}")


def check_import(folder, name, dtype=torch.float32, shard=None, **settings):
    theirs, back = f"{folder}/theirs", f"{folder}/back"
    run(f"rm -rf {theirs} {back}")
    torch.manual_seed(2)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=85, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model = model.to(dtype)
    single = LlamaForCausalLM(model.config)  # not model.float(): that would keep RoPE's rounded frequencies
    single.load_state_dict(model.state_dict())
    model.save_pretrained(theirs, safe_serialization=True, **({"max_shard_size": shard} if shard else {}))
    assert not shard or os.path.exists(f"{theirs}/model.safetensors.index.json")
    run(f"{TRAIN} --import hf {theirs} --export hf {back}")
    stored = {}
    for file in sorted(os.listdir(theirs)):
        if file.endswith(".safetensors"):
            stored.update(load_file(f"{theirs}/{file}"))
    again = load_file(f"{back}/model.safetensors")
    same = stored.keys() == again.keys() and all(torch.equal(stored[key].float(), again[key]) for key in stored)
    report(name, *difference(["--import", "hf", theirs], single.float().eval()), same, "" if same else ", other tensors when exported again")


print(f"Transformers {transformers.__version__}, PyTorch {torch.__version__}, tolerance {TOLERANCE}")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    os.environ["HF_MODULES_CACHE"] = f"{folder}/modules"
    run(f"{SYNTH} --tokens 20000 --val-tokens 2000 --vocab {VOCAB} --out {folder}/data")
    for name, (flags, own_code) in VARIANTS.items():
        check_export(folder, name, flags, own_code)
    check_import(folder, "import: F32")
    check_import(folder, "import: BF16", torch.bfloat16)
    check_import(folder, "import: F16", torch.float16)
    check_import(folder, "import: 2 kv heads, shards", num_key_value_heads=2, shard="40KB")
    check_import(folder, "import: tied", tie_word_embeddings=True)
print(f"{failures} failed" if failures else "all agree")
sys.exit(failures > 0)
