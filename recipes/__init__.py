"""Ready-made LightningModules and LightningDataModules, plain Lightning code with nothing of ours inside.

What a recipe trains is written here; which pieces it combines, and with which values, in ``conf/recipe``.
Each recipe needs only its own packages. For all of them: ``pip install torchvision scikit-learn``.
"""
