"""Makes `src/vgrpo/assets/tiny-sd3`, the embedded Stable Diffusion 3 pipeline, from nothing but this file and `scenes.py`.

    python tools/pretrain.py all --work build/pretrain      # data, vae, transformer, assemble, accuracy: one after another

The model is mediocre on purpose, as web-trained models are: 40 % of its training captions belong to another picture. It
can draw every scene but follows a caption only loosely, which is what alignment is for.

What it is: an `AutoencoderKL` with 8×8×4 latents (0.65 M parameters), two CLIP text encoders of two layers and width 64
trained together with the transformer, a T5 that always answers zero, for none was trained (call the pipeline with
`max_sequence_length=1`, its one token), and an `SD3Transformer2DModel` with 16 image tokens, width 128, 4 layers
(2.3 M parameters).
The folder in the package had `transformer` for 56 minutes and then `transformer --more` for 58 minutes. Every step is
seeded; on one machine and thread count the result is repeatable but for how many steps fit into the minutes. Times and
accuracy stand in LOG.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import scenes
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from vgrpo.config import load_recipe
from vgrpo.evaluation import evaluate
from vgrpo.policies.pipeline import Pipeline
from vgrpo.prompts import read_prompts
from vgrpo.rewards.shapes import Shapes
from vgrpo.testing import t5_tokenizer

ASSET = Path(__file__).parents[1] / "src/vgrpo/assets/tiny-sd3"
STAGES = ("data", "vae", "transformer", "assemble", "accuracy")
TOKENS = 12
"""Text tokens: the longest caption has 10 with its two ends."""
WRONG = 0.4
"""Share of training captions that belong to another picture."""
PARTS = ("transformer", "text_encoder", "text_encoder_2")
"""What is trained together, in folders of these names."""
DROPPED = 0.1
"""Share of empty captions, for classifier-free guidance."""
TAG_WEIGHTS = {
    "single_object": 0.06,
    "colors": 0.12,
    "counting": 0.20,
    "two_object": 0.10,
    "color_attr": 0.27,
    "position": 0.25,
}


# ---------------------------------------------------------------------------------------------------------------- data


def training_captions() -> tuple[list[dict], np.ndarray]:
    """Captions that are not held out, and the probability of each: the tags' weights, spread evenly inside a tag."""
    kept = [c for c in scenes.captions() if not scenes.is_held_out(c["text"])]
    tags = np.array([c["meta"]["tag"] for c in kept])
    weights = np.array([TAG_WEIGHTS[t] / (tags == t).sum() for t in tags])
    return kept, weights / weights.sum()


def render(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    seed, count = job
    kept, weights = training_captions()
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(kept), size=count, p=weights)
    return np.stack([scenes.draw(scenes.realise(kept[c], rng), rng) for c in chosen]), chosen


def data(work: Path, count: int = 100_000) -> None:
    """Renders `count` scenes to `scenes.npz`: images uint8 [N, 64, 64, 3] and the index of each one's caption."""
    with Pool() as pool:
        parts = pool.map(render, [(seed, 1000) for seed in range(count // 1000)])
    np.savez(
        work / "scenes.npz",
        images=np.concatenate([p[0] for p in parts]),
        captions=np.concatenate([p[1] for p in parts]),
    )


def load_images(work: Path) -> tuple[torch.Tensor, np.ndarray]:
    stored = np.load(work / "scenes.npz")
    return torch.from_numpy(stored["images"]).permute(0, 3, 1, 2), stored["captions"]


# ----------------------------------------------------------------------------------------------------------------- VAE


def new_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        sample_size=64,
        block_out_channels=(8, 16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def edges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]


def vae(work: Path, minutes: float = 13.0, batch: int = 32, kl_weight: float = 1e-3) -> None:
    """Trains the autoencoder for `minutes` on L1 of pixels and of their differences, with a light KL."""
    torch.manual_seed(0)
    images, _ = load_images(work)
    net = new_vae()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.0)
    order, start, step, done = torch.Generator().manual_seed(0), time.time(), 0, 0.0
    while done < 1:
        done = (time.time() - start) / (60 * minutes)
        rate = min(step / 100, 1) * (0.5 + 0.5 * math.cos(math.pi * min(done, 1)))
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        x = images[torch.randint(len(images), (batch,), generator=order)].float() / 127.5 - 1
        posterior = net.encode(x).latent_dist
        y = net.decode(posterior.sample()).sample
        pixel = F.l1_loss(y, x)
        edge = sum(F.l1_loss(a, b) for a, b in zip(edges(y), edges(x), strict=True))
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        loss = pixel + edge + kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            log(
                work,
                stage="vae",
                step=step,
                seconds=time.time() - start,
                pixel=pixel.item(),
                edge=edge.item(),
                kl=kl.item(),
            )
        step += 1
    net.eval()
    with torch.no_grad():
        mean, std = zip(
            *[(d.mean, d.std) for d in (net.encode(x.float() / 127.5 - 1).latent_dist for x in images.split(500))],
            strict=True,
        )
        mean, std = torch.cat(mean), torch.cat(std)
        error = (net.decode(mean[:1000]).sample.clamp(-1, 1) - (images[:1000].float() / 127.5 - 1)).pow(2).mean()
    net.register_to_config(shift_factor=mean.mean().item(), scaling_factor=1 / mean.std().item())
    net.save_pretrained(work / "vae")
    torch.save({"mean": mean, "std": std}, work / "latents.pt")
    log(
        work,
        stage="vae",
        step=step,
        seconds=time.time() - start,
        psnr=10 * math.log10(4 / error.item()),
        latent_std=std.mean().item(),
    )


# --------------------------------------------------------------------------------------------------------- text encoders


def new_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer whose merges make one token of each word of the captions; any other text falls back to bytes."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator([c["text"] for c in scenes.captions()], trainer)
    merges = [tuple(m) for m in json.loads(bpe.to_str())["model"]["merges"]]
    tokens = [
        *alphabet,
        *[a + "</w>" for a in alphabet],
        *["".join(m) for m in merges],
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocab = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=TOKENS)


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    size = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "projection_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return CLIPTextModelWithProjection(
        CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=TOKENS, **size, **ends)
    )


def new_t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """Stands where diffusers expects a T5: its last norm is zero, and so is all that it says."""
    config = T5Config(
        vocab_size=len(tokenizer), d_model=128, d_kv=8, d_ff=32, num_layers=1, num_heads=1, dropout_rate=0.0
    )
    t5 = T5EncoderModel(config)
    torch.nn.init.zeros_(t5.encoder.final_layer_norm.weight)
    return t5


def encode(encoders: list[torch.nn.Module], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `StableDiffusion3Pipeline.encode_prompt` with `new_t5`: penultimate states side by side, then one zero token."""
    out = [e(ids, output_hidden_states=True) for e in encoders]
    tokens = torch.cat([o.hidden_states[-2] for o in out], -1)
    return F.pad(tokens, (0, 0, 0, 1)), torch.cat([o.text_embeds for o in out], -1)


# ---------------------------------------------------------------------------------------------------------- transformer


def new_transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )


def transformer(work: Path, minutes: float = 60.0, batch: int = 256, more: bool = False) -> None:
    """Flow matching for `minutes`: uniform t, velocity target, EMA. Caption noise and dropping are drawn anew each time.

    `more` goes on from the weights in `work`, with half the rate and other draws.
    """
    torch.manual_seed(0)
    _, chosen = load_images(work)
    kept, _ = training_captions()
    config = AutoencoderKL.load_config(work / "vae")
    stored = torch.load(work / "latents.pt", weights_only=True)
    mean = (stored["mean"] - config["shift_factor"]) * config["scaling_factor"]
    std = stored["std"] * config["scaling_factor"]
    tokenizer = new_tokenizer()
    assert max(len(tokenizer(c["text"]).input_ids) for c in scenes.captions()) <= TOKENS
    texts = [c["text"] for c in kept] + [""]
    ids = tokenizer(texts, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
    nets = torch.nn.ModuleList([new_transformer(), new_text_encoder(tokenizer), new_text_encoder(tokenizer)])
    peak = 1e-3
    if more:
        peak = 5e-4
        kinds = (SD3Transformer2DModel, CLIPTextModelWithProjection, CLIPTextModelWithProjection)
        parts = zip(nets, kinds, PARTS, strict=True)
        for net, kind, name in parts:
            net.load_state_dict(kind.from_pretrained(work / name).state_dict())
    averaged = torch.optim.swa_utils.AveragedModel(nets, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(nets.parameters(), lr=peak, weight_decay=0.01, betas=(0.9, 0.99))
    chosen_t, draw = torch.from_numpy(chosen), torch.Generator().manual_seed(2 if more else 1)
    start, step, done, running = time.time(), 0, 0.0, 0.0
    while done < 1:
        done = (time.time() - start) / (60 * minutes)
        fall = 0.5 + 0.5 * math.cos(2 * math.pi * (min(done, 1) - 0.5)) if done > 0.5 else 1.0
        optimizer.param_groups[0]["lr"] = peak * min(step / 500, 1) * (0.02 + 0.98 * fall)
        rows = torch.randint(len(mean), (batch,), generator=draw)
        x0 = mean[rows] + std[rows] * torch.randn(mean[rows].shape, generator=draw)
        other = chosen_t[torch.randint(len(mean), (batch,), generator=draw)]
        luck = torch.rand(batch, generator=draw)
        caption = torch.where(luck < WRONG, other, chosen_t[rows])
        caption = torch.where(torch.rand(batch, generator=draw) < DROPPED, len(kept), caption)
        t, eps = torch.rand(batch, generator=draw), torch.randn(x0.shape, generator=draw)
        x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps
        context, pooled = encode(list(nets[1:]), ids[caption])
        v = nets[0](x_t, context, pooled, t * 1000, return_dict=False)[0]
        loss = F.mse_loss(v, eps - x0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(nets)
        running = loss.item() if step == 0 else 0.99 * running + 0.01 * loss.item()
        if step % 200 == 0:
            log(work, stage="transformer", step=step, seconds=time.time() - start, loss=running)
        if step % 1500 == 1499 or done >= 1:
            for name, net in zip(PARTS, averaged.module, strict=True):
                net.save_pretrained(work / name)
        step += 1


def assemble(work: Path) -> None:
    """Writes the pipeline folder, in the precision it was trained in."""
    torch.manual_seed(0)
    tokenizer = new_tokenizer()
    pipe = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel.from_pretrained(work / "transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=AutoencoderKL.from_pretrained(work / "vae"),
        text_encoder=CLIPTextModelWithProjection.from_pretrained(work / "text_encoder"),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(work / "text_encoder_2"),
        tokenizer_2=tokenizer,
        text_encoder_3=new_t5(t5_tokenizer()),
        tokenizer_3=t5_tokenizer(),
    )
    pipe.save_pretrained(ASSET)


def accuracy(work: Path, folder: Path = ASSET) -> None:
    """Logs the share of validation captions drawn wholly right, by category, plain and guided, few steps and many."""
    prompts = read_prompts("asset:scenes/validation.jsonl")
    for sampler, steps, guidance in (("dpmpp", 6, 1.0), ("euler", 25, 1.0), ("euler", 25, 3.0)):
        changes = {"model.path": str(folder), "rollout.sampler": sampler, "rollout.steps": steps}
        policy = Pipeline(load_recipe("tiny", **changes, **{"rollout.guidance": guidance}), torch.device("cpu"))
        rewards = {"strict": Shapes(mode="strict"), "graded": Shapes(mode="graded")}
        where = work / f"accuracy/{sampler}-{steps}-{guidance:g}"
        out = evaluate(
            policy, prompts, rewards, images_per_prompt=1, micro_batch=100, seed=0, pictures=40, folder=where
        )
        by_tag = {tag: round(score[0], 3) for tag, score in out["by_tag"]["strict"].items()}
        log(work, stage="accuracy", sampler=sampler, steps=steps, guidance=guidance, **out["scores"], by_tag=by_tag)


def log(work: Path, **row: object) -> None:
    row = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
    print(row, flush=True)
    with (work / "log.jsonl").open("a") as f:
        f.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["all", *STAGES])
    parser.add_argument("--work", type=Path, default=Path("build/pretrain"))
    parser.add_argument("--minutes", type=float, help="how long to train (vae 13, transformer 60)")
    parser.add_argument("--more", action="store_true", help="go on with the transformer that is in --work")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    minutes = {} if args.minutes is None else {"minutes": args.minutes}
    stages = STAGES if args.stage == "all" else (args.stage,)
    if "data" in stages:
        data(args.work)
    if "vae" in stages:
        vae(args.work, **minutes)
    if "transformer" in stages:
        transformer(args.work, **minutes, more=args.more)
    if "assemble" in stages:
        assemble(args.work)
    if "accuracy" in stages:
        accuracy(args.work)


if __name__ == "__main__":
    main()
