// Package e2e tests a whole node as its users see it: the built programs, the
// project's Caddyfile, HTTPS, previews, and sandboxes on real rootless Podman.
//
// Run it by `make test-integration PACKAGES=./test/e2e`.
package e2e
