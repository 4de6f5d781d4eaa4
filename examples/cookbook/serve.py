"""Train on several processes, save the weights, and serve the model over HTTP with the standard library.

Train:  headway launch --cpu -n 2 examples/cookbook/serve.py
Serve:  python examples/cookbook/serve.py --port 8000
Ask:    curl -d '{"inputs": [[1, 2, 3, 4]]}' http://127.0.0.1:8000/

`save_model` writes safetensors under the model's own names, from any layout, so the server needs neither Headway nor the number
of processes of the training. It listens on this machine only, and runs one batch at a time. The answer to the request above is
close to {"outputs": [[10.0]]}, because the network adds the numbers of a row.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


def make_model() -> torch.nn.Module:
    """Return an untrained network that adds four numbers."""
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def train(folder: str) -> None:
    """Train the model, and write its weights to `<folder>/model.safetensors`."""
    set_seed(0)
    accelerator = Accelerator()
    inputs = torch.randn(512, 4)
    rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(rows, batch_size=32 // accelerator.num_data_shards, shuffle=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(10):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_model(model, folder)
    accelerator.print(f"loss {loss:.4f}; the weights are in {folder}")
    accelerator.end_training()


class ModelServer(ThreadingHTTPServer):
    """HTTP server that answers with a model.

    Args:
        folder: Folder of the saved weights.
        port: Port to listen on, or 0 for a free one.
    """

    def __init__(self, folder: str | Path, port: int) -> None:
        self.model = make_model()
        self.model.load_state_dict(load_file(Path(folder, "model.safetensors")))
        self.model.eval()
        self.model_lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)


class Handler(BaseHTTPRequestHandler):
    """Answers POST requests of {"inputs": [[number, ...], ...]} with {"outputs": [[number], ...]}."""

    server: ModelServer

    def do_POST(self) -> None:
        """Run the model on the rows of a request."""
        try:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            inputs = torch.tensor(json.loads(body)["inputs"], dtype=torch.float32)
            with self.server.model_lock, torch.inference_mode():
                outputs = self.server.model(inputs)
            self._answer(200, {"outputs": outputs.tolist()})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._answer(400, {"error": str(error)})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/served")
    parser.add_argument("--port", type=int, help="serve the saved weights on this port, instead of training")
    args = parser.parse_args(arguments)
    if args.port is None:
        train(args.folder)
    else:
        with ModelServer(args.folder, args.port) as server:
            print(f"http://127.0.0.1:{server.server_port}/ is ready; press Ctrl-C to stop it")
            server.serve_forever()


if __name__ == "__main__":
    main()
