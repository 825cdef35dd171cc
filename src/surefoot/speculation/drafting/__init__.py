"""What proposers with a network of their own (drafters) share.

``folders`` finds and reads a checkpoint, ``fit`` holds it against the target, ``network`` is what
a network has to offer, with the embedding and head that it may share with the target. ``pools``
keeps its KV under the target's block ids and drafts' keys in scratch blocks, ``picking`` draws
drafts with the target's own noise, ``tree`` grows trees, and ``proposer`` is the proposer around
all this.
``dummy`` and ``facts`` are for measurements and for people.
"""
