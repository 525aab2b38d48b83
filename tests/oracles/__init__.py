"""Independent measuring instruments: nothing in here imports the library.

* `moments`: Renyi moments by adaptive quadrature, milliseconds each; `rdp_to_epsilon`.
* `precise`: the same and hockey-stick divergences at 60 digits, seconds each.
* `mixtures`: divergences of normal mixtures, plain closed forms of the claims, and the
  naive product rate that the soundness tests must catch.
* `adaptive`: every strategy of a finite menu; sampled steps by quadrature, and played.
* `trees`, `episodes`: exact releases of one step on small trees, by enumeration.
* `allocation`: one epoch of random allocation, by integrals over its steps' noise.
* `draws`: distributions of small draws, inclusion probabilities, exact tests of counts.
* `adversary`: random designs, worst-case contributions and the search for them.
"""
