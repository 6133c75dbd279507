"""Update rules of the distributed optimizer, one file each."""
