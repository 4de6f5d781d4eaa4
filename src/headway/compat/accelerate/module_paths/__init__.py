"""Modules that provide Accelerate's names under `headway`, such as `headway.utils` for `accelerate.utils`.

`headway/__init__.py` adds this folder to the search path of `headway`. `from headway.utils import set_seed` thus
imports `utils/__init__.py` of this folder under the name `headway.utils`.
"""
