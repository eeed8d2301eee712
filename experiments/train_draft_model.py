"""Train a small Llama from scratch on a target's own answers: the draft model of speculative sampling.

    python -m experiments.train_draft_model target=smollm2_135m answers=answers.jsonl
    python -m experiments.train_draft_model run=runs/draft_model steps=4000      # goes on where the run stopped

Every answer is a sequence; the loss is the cross-entropy of the response's tokens over the draft vocabulary. The
embeddings, tied to the head, start as the principal components of the target's, and only rows of tokens that occur in
the answers are trained: the others keep their start. Each step's sequences follow from (seed, step) alone, so a resumed
run sees what an unbroken one would have seen.

Shapes: R sequences, P positions of the longest, T predicted tokens, V vocabulary, U tokens that occur, H hidden size.
"""

import json
import time
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from dcoco.targets import load_target
from drafters.autoregressive import save
from drafters.checkpoint import target_identity
from experiments.environment import CONF, describe
from experiments.features import read_answers
from experiments.precision import autocast
from experiments.schedule import batches_of_epoch, learning_rate
from experiments.settings import check_numbers, check_same_run, shaping
from experiments.train_drafter import draft_vocabulary, walk_rounds
from verifier.errors import ConfigError
from verifier.target import Target

EMBEDDING_SIZE = 0.05  # root mean square of the embeddings at the start
PIECE = 256  # tokens whose logits are in memory at once: what fits the processor's cache trains a sixth faster


@hydra.main(version_base=None, config_path=CONF, config_name="train_draft_model")
def main(config: DictConfig) -> None:
    check_numbers(config)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    model, tokenizer, _ = load_target(config.target, device=config.device)
    target = Target(model, pack=False)
    answers = read_answers(Path(config.answers), config.limit, config.skip)
    run = Path(config.run)
    run.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(target, answers, config)
    trainer.restore(run / "state.pt")
    with tqdm(total=config.steps, initial=trainer.step, desc="train", unit="step") as bar:
        while trainer.step < config.steps:
            loss = trainer.train_step()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_second=round(trainer.tokens / trainer.seconds))
            if trainer.step == config.steps or trainer.step % config.save_every == 0:
                progress = {"step": trainer.step, "seconds": round(trainer.seconds), "tokens": trainer.tokens}
                line = {**progress, **trainer.evaluate()}
                recipe = {"config": OmegaConf.to_container(config), "figures": line, **describe()}
                trainer.save_checkpoint(run / "checkpoint", target_identity(target, tokenizer), recipe)
                trainer.save(run / "state.pt")  # after the checkpoint: a run that dies between them repeats the steps
                tqdm.write(json.dumps(line))
                with (run / "log.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def projected_embeddings(target: Target, size: int) -> Tensor:
    """The target's embeddings [V, H'] on their first principal components: [V, size] float32."""
    table = target.embedding_weight().float()
    if size > table.shape[1]:
        raise ConfigError(f"hidden_size={size}: must be at most the target's {table.shape[1]}, whose table it projects")
    centred = table - table.mean(0)
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -size:]
    components *= components.gather(0, components.abs().argmax(0, keepdim=True)).sign()  # a run may go on elsewhere
    found = centred @ components
    return found * (EMBEDDING_SIZE / found.pow(2).mean().sqrt())


def draft_model(target: Target, config: DictConfig, vocab_size: int) -> Any:
    """An untrained draft model."""
    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=target.max_positions,
        tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.config.eos_token_id,
    )
    return LlamaForCausalLM(shape)


class Trainer:
    """Weights, optimizer and position in the data of one run. The model knows only the U tokens that occur."""

    def __init__(self, target: Target, answers: list[dict[str, list[int]]], config: DictConfig):
        self.config, self.target, self.device = config, target, target.device
        count = len(answers)
        if not 1 <= config.held_out <= count - config.sequences_per_step:
            raise ConfigError(
                f"held_out={config.held_out} of {count} answers: keep at least one for evaluation and "
                f"{config.sequences_per_step} (sequences_per_step) for training"
            )
        found = draft_vocabulary(answers, config.draft_vocab_size)
        self.draft_ids = torch.arange(target.vocab_size) if found is None else found
        texts = [torch.tensor(answer["prompt_ids"] + answer["response_ids"]) for answer in answers]
        self.occurring = torch.cat([*texts, self.draft_ids]).unique()  # [U]
        row_of = torch.full((target.vocab_size,), -1)
        row_of[self.occurring] = torch.arange(len(self.occurring))
        self.texts = [row_of[text] for text in texts]
        self.prompts = [len(answer["prompt_ids"]) for answer in answers]
        self.training, self.held_out = count - config.held_out, range(count - config.held_out, count)
        self.head_rows = row_of[self.draft_ids].to(self.device)
        # From row to its column in the draft vocabulary, -100 (ignored by the loss) for tokens that can't be drafted.
        self.column_of = torch.full((len(self.occurring),), -100, device=self.device)
        self.column_of[self.head_rows] = torch.arange(len(self.draft_ids), device=self.device)

        torch.manual_seed(config.seed)
        self.model = draft_model(target, config, len(self.occurring))
        self.model.set_attn_implementation("eager")  # on the CPU a step takes a quarter less than with the fused kernel
        self.embeddings = projected_embeddings(target, config.hidden_size)  # [V, H]: what the untrained rows keep
        with torch.no_grad():
            self.model.model.embed_tokens.weight.copy_(self.embeddings[self.occurring])
        self.model.to(self.device).train()
        matrices = [module.weight for module in self.model.model.modules() if isinstance(module, nn.Linear)]
        decayed = {id(weight) for weight in matrices}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in decayed]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def train_step(self) -> float:
        """One optimizer step; returns the loss."""
        begun = time.perf_counter()
        chosen = self._sequences_of_step()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        hidden, labels = self.hidden(chosen)
        columns, head = self.column_of[labels], self.head()
        pieces = zip(hidden.split(PIECE), columns.split(PIECE), strict=True)
        losses = [self.loss(self.logits(some, head), wanted) for some, wanted in pieces]
        loss = torch.stack(losses).sum() / (columns >= 0).sum().clamp(min=1)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += sum(len(self.texts[index]) for index in chosen)
        self.seconds += time.perf_counter() - begun
        return loss.item()

    def hidden(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden states [T, H] that predict the responses of some sequences, one after the other, and the rows [T] of
        their tokens."""
        ids_RP = pad_sequence([self.texts[index] for index in chosen], batch_first=True).to(self.device)
        width = ids_RP.shape[1]
        places = [
            torch.arange(row * width + self.prompts[index], row * width + len(self.texts[index]))
            for row, index in enumerate(chosen)
        ]
        places_T = torch.cat(places).to(self.device)
        with autocast(self.device, self.target.dtype):
            # Padding stands behind all that counts: a causal model needs no mask for it.
            hidden = self.model.model(input_ids=ids_RP, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[places_T - 1], ids_RP.flatten()[places_T]

    def head(self) -> Tensor:
        """The head's weight [W, H] for the draft vocabulary."""
        return self.model.model.embed_tokens.weight[self.head_rows].to(self.target.dtype)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Logits [T, W] over the draft vocabulary, float32."""
        return F.linear(hidden.to(head.dtype), head).float()

    def loss(self, logits: Tensor, columns: Tensor) -> Tensor:
        """The summed cross-entropy of the tokens that can be drafted."""
        return F.cross_entropy(logits, columns, ignore_index=-100, reduction="sum")

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Greedy acceptance on held-out answers.

        Rounds are walked through each, every one beginning where the one before ended. What is accepted is the truth,
        so predictions given the truth are the very drafts.
        """
        block, head = self.config.block_size, self.head()
        rounds, tokens, losses, right, drafted = 0, 0, 0.0, 0, 0
        for start in range(0, len(self.held_out), 8):
            chosen = list(self.held_out[start : start + 8])
            hidden, labels = self.hidden(chosen)
            logits, columns = self.logits(hidden, head), self.column_of[labels]
            losses, drafted = losses + self.loss(logits, columns).item(), drafted + int((columns >= 0).sum())
            lengths = [len(self.texts[index]) - self.prompts[index] for index in chosen]
            for hits in (logits.argmax(-1) == columns).split(lengths):
                ahead = F.pad(hits[1:].long(), (0, block - 1)).unfold(0, block, 1)  # the prefill gives the first token
                rounds += walk_rounds(ahead.cumprod(-1).sum(-1).tolist())
                tokens += len(hits) - 1
                right += int(hits.sum())
        count = tokens + len(self.held_out)
        return {
            "length": round(tokens / max(1, rounds), 4),
            "accuracy": round(right / count, 4),
            "loss": round(losses / max(1, drafted), 4),  # as in training, of tokens that can be drafted
        }

    def save_checkpoint(self, folder: Path, identity: dict[str, Any], recipe: dict[str, Any]) -> None:
        """Write the drafter: the model with the whole vocabulary."""
        whole = draft_model(self.target, self.config, self.target.vocab_size)
        state = self.model.state_dict()
        table = self.embeddings.clone()
        table[self.occurring] = state["model.embed_tokens.weight"].cpu()
        whole.load_state_dict(state | {"model.embed_tokens.weight": table, "lm_head.weight": table})
        save(folder, whole, self.config.block_size, self.draft_ids, identity, recipe)

    def save(self, file: Path) -> None:
        """Write everything that an exact resume needs."""
        state = {
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": [self.step, self.seconds, self.tokens],
            "settings": shaping(self.config),
        }
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def restore(self, file: Path) -> None:
        """Go on from a state, where there is one; ConfigError where it is of a run with other settings."""
        if file.exists():
            state = torch.load(file, weights_only=True, map_location=self.device)
            check_same_run(state, self.config, file)
            self.model.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds, self.tokens = state["progress"]

    def _sequences_of_step(self) -> list[int]:
        size = self.config.sequences_per_step
        epoch, position = divmod(self.step, self.training // size)
        if self._epoch[0] != epoch:
            lengths = [len(text) for text in self.texts[: self.training]]
            self._epoch = (epoch, batches_of_epoch(lengths, size, self.config.seed, epoch))
        return self._epoch[1][position % len(self._epoch[1])]


if __name__ == "__main__":
    main()
