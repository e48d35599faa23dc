// Package power tests what a loss of power leaves of a node: its data and Podman's storage are on a file system of
// their own, whose device the test copies at random moments.
//
// Run it by `make test-power`, as root.
package power
