"""Methods and names of other training libraries, with advice on what to use in Headway instead.

Only error messages use these tables. They do not contain Accelerate's names, because Headway provides those.
"""

METHODS = {
    "setup": "use accelerator.prepare(model, optimizer)",
    "setup_module": "use accelerator.prepare(model)",
    "setup_optimizers": "use accelerator.prepare(optimizer)",
    "setup_dataloaders": "use accelerator.prepare(loader)",
    "launch": "start the script with `headway launch train.py`, or call headway.notebook_launcher in a notebook",
    "all_gather": "use accelerator.gather(tensor), or gather_for_metrics without repeated samples",
    "all_reduce": "use accelerator.reduce(tensor)",
    "barrier": "use accelerator.wait_for_everyone()",
    "broadcast": "use headway.utils.broadcast(tensor)",
    "no_backward_sync": "use `with accelerator.accumulate(model):`, or no_sync(model)",
    "clip_gradients": "use accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    "log_dict": "use accelerator.log({...})",
    "save_checkpoint": "use accelerator.save_state()",
    "load_checkpoint": "use accelerator.load_state(folder) or accelerator.resume('latest')",
    "seed_everything": "use headway.set_seed(seed)",
    "global_rank": "use accelerator.process_index",
    "local_rank": "use accelerator.local_process_index",
    "world_size": "use accelerator.num_processes",
    "is_global_zero": "use accelerator.is_main_process",
    "to_device": "batches of prepared loaders are on accelerator.device; else use tensor.to(accelerator.device)",
    "fit": "an Accelerator runs your own loop; headway.Trainer has train()",
    "train": "an Accelerator runs your own loop; headway.Trainer has train()",
}
"""Mapping from methods and attributes of other training libraries to advice on what to use in Headway."""

NAMES = {
    "Fabric": "use headway.Accelerator",
    "LightningModule": "use a torch.nn.Module with your own loop, or headway.Trainer",
    "seed_everything": "use headway.set_seed",
    "ModelCheckpoint": "use ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=n) and accelerator.save_state()",
    "DistributedSampler": "prepared loaders split the data themselves; leave the sampler out",
}
"""Mapping from names that scripts import from other training libraries to advice on what to import from Headway."""
