"""Checkpoints in a bucket: one of two processes is killed, and the run continues from the store with the same loss.

    pip install 'headway[s3]' moto flask flask-cors boto3
    python examples/object_store.py                                                     starts an S3 server on this machine
    headway launch --max_restarts 1 examples/object_store.py --url s3://bucket/run      trains in your bucket

The first command trains twice, undisturbed and with a kill, and both runs print the same loss after 24 updates. The second
command uses the credentials of the environment. Add `--trouble` to kill one process.
"""

import argparse
import os
import signal
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

NUM_EPOCHS, KILL_AFTER = 3, 13


def train(url: str, has_trouble: bool) -> None:
    """Train with checkpoints at `url`; with `has_trouble`, all ranks except rank 0 kill themselves once."""
    set_seed(0)
    accelerator = Accelerator(project_config=ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=2))
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    restored = accelerator.resume("latest")
    if restored is not None:
        accelerator.print(restored)
    for _ in accelerator.epochs(NUM_EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 5 == 0:
                accelerator.save_state(blocking=False)
            if has_trouble and restored is None and accelerator.num_updates == KILL_AFTER:
                accelerator.wait_for_save()  # a collective, so all ranks call it
                if accelerator.process_index != 0:
                    os.kill(os.getpid(), signal.SIGKILL)
    accelerator.print(f"loss after {accelerator.num_updates} updates: {loss.item():.6f}")
    accelerator.end_training()


def serve_and_train() -> None:
    """Train twice against a local S3 server (moto): undisturbed, and with a kill."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}", "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}  # fmt: skip
    os.environ.update(settings)
    boto3.client("s3").create_bucket(Bucket="bucket")
    launch = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", "--max_restarts", "1", __file__]
    for name, flags in (("undisturbed", []), ("killed", ["--trouble"])):
        print(name, flush=True)
        subprocess.run([*launch, "--url", f"s3://bucket/{name}", *flags], check=True)
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="folder in a bucket, such as s3://bucket/run; default: a local server")
    parser.add_argument("--trouble", action="store_true", help="kill a process after 13 updates")
    args = parser.parse_args()
    if args.url is None:
        serve_and_train()
    else:
        train(args.url, args.trouble)


if __name__ == "__main__":
    main()
