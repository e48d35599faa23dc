package server

import (
	"slices"
	"syscall"

	"github.com/doze-run/doze/runtime/guest"
)

// parseSignal refuses what guest.ParseSignal does not know.
func parseSignal(name string) (syscall.Signal, error) {
	if sig := guest.ParseSignal(name); sig != 0 {
		return sig, nil
	}
	return 0, refuse(guest.CodeInvalid, "%q is not a known signal; use a name such as \"SIGHUP\" or \"TERM\"", name)
}

// asksToEnd reports whether a signal ends a process by convention, with any status.
func asksToEnd(sig syscall.Signal) bool {
	return slices.Contains([]syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL}, sig)
}
