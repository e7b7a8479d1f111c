"""Importing this module puts every method and recipe of this folder into the package's tables."""

from scale_cli.methods import register
from scripts.research.adept import Adept
from scripts.research.average import Average
from scripts.research.decay_to_base import DecayToBase
from scripts.research.lookahead import Lookahead
from scripts.research.osf import Osf

# The last recipe is the outermost: the average is taken after all else has acted.
register(Osf(), Adept(), DecayToBase, Lookahead, Average)
