// Package power tests what a loss of power and a full disk leave of a node: its data and Podman's storage are on a file
// system of their own, whose device the test fills, or copies at random moments.
//
// Run it by `make test-power`, as root.
package power
