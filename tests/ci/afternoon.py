"""An afternoon of somebody who comes from TransformerLens or nnterp, in twelve steps.

The steps are those of their tutorials: load a model by name, look at what was loaded, run it with a
cache, ask for one head's attention, hook it, remove something, rank heads, plot, save and read.
`test_afternoon.py` runs this file, and type checkers read it in their strict modes.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
import torch
from torch import Tensor

from nope_probe import (
    Ablation,
    UserError,
    ablated,
    attribute_heads,
    capture_attention,
    capture_losses,
    capture_scores,
    figures,
    load,
    measure_heads,
    read_run,
    run_ablations,
    sequences,
)

folder = Path(sys.argv[1])

# 1. Load a model by its name, and look at what came.
loaded = load("rope-tiny")
model, n_layers, n_heads = loaded.model, loaded.info.n_layers, loaded.info.n_heads
print(loaded)

# 2. Make tokens, and look at them.
data = sequences(tokenizer=loaded.tokenizer, n_seqs=32, seq_len=24)
print(data, tuple(data.inputs.shape))

# 3. Run with a cache, as in TransformerLens: the attention of one head on the first sequence.
_, cache = model.run_with_cache(data.inputs)
on_first = cache["pattern", 1][0, 3]
print("L1H3's attention in the first sequence:", tuple(on_first.shape))

# 4. The same head on average: its map by layer and head, and its weights.
maps = capture_scores(loaded, data, per_head=True)
weights = capture_attention(loaded, data).mean
print(maps)
assert maps.heads.shape == (n_layers, n_heads, 24, 24)
assert torch.equal(maps.head(1, 3).mean.nan_to_num(), maps.heads[1:2, 3].nan_to_num())
expected = torch.as_tensor(cache["pattern", 1][:, 3]).mean(0)
torch.testing.assert_close(weights[1, 3], expected, rtol=1e-4, atol=1e-5, check_dtype=False)

# 5. A head that does not exist says what does.
try:
    maps.head(n_layers, 0)
except UserError as error:
    print("refused:", error)

# 6. Rank heads by a number, in pandas.
measured = measure_heads(maps)
ranked = measured.to_frame().sort_values("amplitude", ascending=False)
layer, head = int(ranked["layer"].iloc[0]), int(ranked["head"].iloc[0])
print(f"L{layer}H{head} has the strongest pattern:", measured[layer, head].amplitude)

# 7. Remove something for a while, with a hook of my own inside.
seen: dict[str, float] = {}


def read_later(tensor: Tensor, hook: object) -> None:
    seen["later keys"] = float(tensor.triu(1).sum(-1).mean())


with ablated(loaded, Ablation(remove=["mask"])):
    unmasked = capture_scores(loaded, data, per_head=True)
    model.run_with_hooks(data.inputs, fwd_hooks=[("blocks.1.attn.hook_pattern", read_later)])
assert seen["later keys"] > 0.1

# 8. Compare the heads with and without it.
kept = attribute_heads({(): maps, "mask": unmasked})
change = kept.to_frame().pivot(index=["layer", "head"], columns="removed", values="lead")
print((change["mask"] - change["intact"]).abs().nlargest(3))
assert change.loc[(layer, head), "intact"] == kept[layer, head].conditions["intact"].lead.value

# 9. What the model loses, token by token.
before = capture_losses(loaded, data)
with ablated(loaded, "rope"):
    after = capture_losses(loaded, data)
print(f"without RoPE the loss is higher by {float((after - before).mean()):.2f} nats")

# 10. Everything that can be removed, in one run that keeps its folder.
run = run_ablations(loaded, data, out=folder / "run", layers=2, remove=["w_q", "w_k"], seed=1)
table = run.tables["pattern"]
print(table.groupby("removed")["lead"].mean().round(2))

# 11. Plot, with the figures of the package and with plotly, and save the page.
figure: go.Figure = figures.score_maps(maps)
bars = px.bar(table, x="removed", y="lead", facet_col="layer")
figure.write_html(folder / "maps.html", include_plotlyjs="cdn")
bars.write_html(folder / "lead.html", include_plotlyjs="cdn")

# 12. Save the numbers, and read the run back.
ranked.to_csv(folder / "heads.csv", index=False)
again = read_run(folder / "run")
pd.testing.assert_frame_equal(again.tables["pattern"], table)
np.testing.assert_array_equal(again.maps["term/mask"], run.maps["term/mask"])
pd.testing.assert_frame_equal(pd.read_csv(folder / "heads.csv"), ranked.reset_index(drop=True))
print("read back:", again)
