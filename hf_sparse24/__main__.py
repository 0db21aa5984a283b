"""`python -m hf_sparse24`: the command `hf-sparse24`, also where it is not on the path."""

import sys

from hf_sparse24_command import main

if __name__ == "__main__":
    sys.exit(main())
