package server

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// signalName is the name of a signal, such as "SIGKILL".
func signalName(sig syscall.Signal) string {
	return cmp.Or(unix.SignalName(sig), fmt.Sprintf("SIG%d", int(sig)))
}

// parseSignal accepts "SIGHUP" and "HUP".
func parseSignal(name string) (syscall.Signal, error) {
	if sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")); sig != 0 {
		return sig, nil
	}
	return 0, refuse(guest.CodeInvalid, "%q is not a known signal; use a name such as \"SIGHUP\" or \"TERM\"", name)
}

// asksToEnd reports whether a signal ends a process by convention, with any status.
func asksToEnd(sig syscall.Signal) bool {
	return slices.Contains([]syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL}, sig)
}
