"""Training: what is easily got wrong about what a row sees, learns and counts."""

from __future__ import annotations

from .mutation import mutation as m

TRAIN = "train/"
LOSS, EAGLE, BLOCKS = "test_train_loss.py", "test_train_eagle3.py", "test_train_dflash.py"
DATA, RUN = "test_train_data.py", "test_train_run.py"

MUTATIONS = (
    m(
        "train/gguf.py",
        "few = bits if name.startswith(_READ_WHOLE) else 8",
        "few = bits",
        "test_drafter_gguf.py",
    ),
    m(
        "kernels/quant.py",
        "* _inverse(scale) + 0.5).clamp(0, 15)",
        "* _inverse(scale)).clamp(0, 15)",
        "test_drafter_gguf.py",
    ),
    m(
        TRAIN + "eagle3/network.py",
        "batch.positions + step, self.rope",
        "batch.positions, self.rope",
        EAGLE,
    ),
    m(
        TRAIN + "eagle3/network.py",
        "index + 1 + step, last",
        "index + step, last",
        EAGLE,
    ),
    m(
        TRAIN + "eagle3/network.py",
        "hidden = ready if config.norm_fed_back else stream",
        "hidden = ready",
        EAGLE,
    ),
    m(
        TRAIN + "attention.py",
        "d_score = (share * (d_share - along) * scale)",
        "d_score = (share * d_share * scale)",
        EAGLE,
    ),
    m(
        TRAIN + "eagle3/recipe.py",
        "batch.ahead(batch.generated, 2 + step)",
        "batch.ahead(batch.generated, 1 + step)",
        LOSS,
    ),
    m(
        TRAIN + "corpus.py",
        "return self.ahead(self.generated, 1) & self.ahead(self.generated, 2)",
        "return self.ahead(self.generated, 2)",
        LOSS,
    ),
    m(
        TRAIN + "corpus.py",
        "both[self.starts[1:-1] - 1] = False",
        "pass",
        LOSS,
    ),
    m(
        TRAIN + "corpus.py",
        "return shifted & (index < self.starts[1:][self.document_of])",
        "return shifted",
        LOSS,
    ),
    m(
        TRAIN + "target.py",
        "return self.decoder.logits(before_norm)",
        "return self.decoder.backend.linear(self.decoder.head_linear, before_norm).float()",
        LOSS,
    ),
    m(
        TRAIN + "target.py",
        "row_slot=batch.documents[rows] - first",
        "row_slot=batch.documents[rows]",
        LOSS,
    ),
    m(
        TRAIN + "loss.py",
        "weight = torch.where(best >= 0, weights[part], 0.0)",
        "weight = weights[part]",
        LOSS,
    ),
    m(
        TRAIN + "loss.py",
        " * teacher.share[rows[part]].unsqueeze(-1)",
        "",
        LOSS,
    ),
    m(
        TRAIN + "recipe.py",
        "(1.0 / np.maximum(pairs, 1))",
        "(1.0 / np.maximum(pairs + 1, 1))",
        LOSS,
    ),
    m(
        TRAIN + "vocabulary.py",
        "corpus.generated & np.repeat(",
        "np.repeat(",
        LOSS,
    ),
    m(
        TRAIN + "measure.py",
        "self.tokens += min(accepted + 1, left)",
        "self.tokens += accepted + 1",
        LOSS,
    ),
    m(
        TRAIN + "measure.py",
        "rounds += output.outputs[0].speculation.rounds - 1",
        "rounds += output.outputs[0].speculation.rounds",
        RUN,
    ),
    m(
        TRAIN + "eagle3/export.py",
        "[index - 1 for index in own.layer_ids]",
        "list(own.layer_ids)",
        RUN,
    ),
    m(
        TRAIN + "eagle3/export.py",
        'tensors["d2t"] = ids - torch.arange(len(ids))',
        'tensors["d2t"] = ids',
        RUN,
    ),
    m(
        TRAIN + "trainer.py",
        'self.optimizer.load_state_dict(state["optimizer"])',
        "pass",
        RUN,
    ),
    m(
        TRAIN + "trainer.py",
        'self.recipe.network.load_state_dict(best["network"])',
        "pass",
        RUN,
    ),
    m(
        TRAIN + "parallel.py",
        "distributed.all_reduce(flat)",
        "pass",
        RUN,
    ),
    m(
        TRAIN + "generate.py",
        'seen.add(read_shard(path)["keys"])',
        "pass",
        DATA,
    ),
    m(
        TRAIN + "dflash/attention.py",
        "d_scores = shares * (d_shares - along) * scale",
        "d_scores = shares * d_shares * scale",
        BLOCKS,
    ),
    m(
        TRAIN + "dflash/network.py",
        "(batch.positions[anchors].unsqueeze(1) + steps)",
        "(batch.positions[anchors].unsqueeze(1) + 0 * steps)",
        BLOCKS,
    ),
    m(
        TRAIN + "dflash/recipe.py",
        "hidden = hidden[:, self.config.first_row :]",
        "hidden = hidden[:, : self.depth]",
        BLOCKS,
    ),
    m(
        TRAIN + "dflash/recipe.py",
        "default_rng((self.options.seed, step, document))",
        "default_rng((self.options.seed, step, index))",
        BLOCKS,
    ),
    m(
        TRAIN + "dflash/recipe.py",
        "1.0 if alike else 1 / max(1, count)",
        "1.0",
        BLOCKS,
    ),
    m(
        TRAIN + "dflash/recipe.py",
        "return np.logical_and.accumulate(np.stack(following, axis=1), axis=1)",
        "return np.stack(following, axis=1)",
        BLOCKS,
    ),
    m(
        "kernels/losses.py",
        "slope += objective.distance * q * (sign - (q * sign).sum(-1, keepdim=True))",
        "slope += objective.distance * q * sign",
        BLOCKS,
    ),
    m(
        TRAIN + "dflash/export.py",
        "[index - 1 for index in own.layer_ids]",
        "list(own.layer_ids)",
        BLOCKS,
    ),
)
