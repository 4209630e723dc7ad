"""Ready-made LightningModules and LightningDataModules, plain Lightning code with nothing of ours inside.

What a recipe trains is written here; which pieces it combines, and with which values, in ``conf/recipe``.
Needs the extra ``recipes`` (torchvision, scikit-learn): ``pip install "amp-trainer[recipes]"``.
"""
