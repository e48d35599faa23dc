// Package egress tests what sandboxes send out, with real sandboxes, real clients
// in them, and servers on the loopback of the test's own. Its tests have the
// build tag integration: make test-integration PACKAGES=./test/egress/...
package egress
