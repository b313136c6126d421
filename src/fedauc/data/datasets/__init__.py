"""One file per dataset; `fedauc.data.find_datasets()` finds them."""
