package server

import (
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// signalName is the name of a signal, such as "SIGKILL".
func signalName(sig syscall.Signal) string {
	if name := unix.SignalName(sig); name != "" {
		return name
	}
	return fmt.Sprintf("SIG%d", int(sig))
}

// parseSignal accepts "SIGHUP" and "HUP".
func parseSignal(name string) (syscall.Signal, error) {
	full := strings.ToUpper(name)
	if !strings.HasPrefix(full, "SIG") {
		full = "SIG" + full
	}
	if sig := unix.SignalNum(full); sig != 0 {
		return sig, nil
	}
	return 0, refuse(guest.CodeInvalid, "%q is not a known signal; use a name such as \"SIGHUP\" or \"TERM\"", name)
}

// asksToEnd reports whether a signal ends a process by convention, with any status.
func asksToEnd(sig syscall.Signal) bool {
	switch sig {
	case syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL:
		return true
	}
	return false
}
