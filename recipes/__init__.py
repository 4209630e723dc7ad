"""Ready-made LightningModules and LightningDataModules in plain Lightning code.

The classes are defined here. The configs in ``conf/recipe`` combine them and set their arguments.
Each recipe needs only its own packages. For all of them: ``pip install torchvision scikit-learn``.
"""
