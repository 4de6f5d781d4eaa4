"""Progress in a real Jupyter kernel: a bar and the Trainer's table are each updated in place."""

import re

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (pip install headway[dev])")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat, which comes with nbclient")

CELLS = ["""
from headway import track
bar = track(["a", "b"], description="a <loop>")
for item in bar:
    bar.show(loss=0.5)
""", """
import torch
from headway import Trainer, TrainingArguments
rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(8)]
args = TrainingArguments("run", per_device_train_batch_size=2, num_train_epochs=2, eval_strategy="epoch", logging_steps=2,
                         save_strategy="no", report_to="none", use_cpu=True)
class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)
Trainer(Model(4, 1), args, train_dataset=rows, eval_dataset=rows, loss_function=torch.nn.functional.mse_loss).train()
""", """
for outer in track(range(3), description="epochs"):
    for inner in track(range(2), description="inner"):
        pass
""", """
import sys
script = "from headway import track; [None for _ in track(range(3), description='child')]"
!FORCE_COLOR=1 {sys.executable} -c "{script}"
"""]  # fmt: skip


def list_displays(cell):
    return [
        "".join(output["data"].get("text/html", "")) for output in cell.outputs if output.output_type == "display_data"
    ]


@pytest.mark.slow
def test_bar_and_table_are_updated_in_place(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    done = client.execute()
    (bar,) = list_displays(done.cells[0])  # updated several times in one place
    assert 'value="2" max="2"' in bar
    assert "a &lt;loop&gt;" in bar
    assert "2/2 | loss 0.5" in bar
    shown = list_displays(done.cells[1])
    # The training bar, the log table and the final table. The evaluations' bars are gone.
    assert len(shown) == 3
    assert 'value="8" max="8"' in shown[0]
    assert "training" in shown[0]
    assert "evaluation" not in shown[0]
    (table,) = [display for display in shown if "<table>" in display and "eval_loss" in display]
    (nested,) = list_displays(done.cells[2])
    assert "epochs" in nested
    assert "inner" not in nested
    output_text = "".join(output.text for output in done.cells[3].outputs)
    assert "child: 3/3" in output_text
    assert "\x1b" not in output_text
    assert re.findall(r"<tr><td>(\d+)</td>", table) == ["2", "4", "6", "8"]
    assert "<th>loss</th>" in table
