// Package tuntest runs tests that make network devices.
package tuntest

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// insideVariable is set in a test that runs again in namespaces of its own.
const insideVariable = "DOZE_TEST_INSIDE"

// Main is the TestMain of a package whose tests make network devices: Inside, then the
// tests. Goroutines that are left are a failure.
func Main(m *testing.M) {
	Inside()
	goleak.VerifyTestMain(m)
}

// Inside runs the test program again as root of a user namespace and a network
// namespace, where it may make devices, without any privilege outside, and where
// 127.0.0.1 can be used. It returns there only; here the program ends with the exit
// code of that.
func Inside() {
	if os.Getenv(insideVariable) == "" {
		os.Exit(inside())
	}
	if err := LoopbackUp(); err != nil {
		panic(err)
	}
}

// inside runs the test again and returns its exit code.
func inside() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"=yes")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		panic(fmt.Sprintf("this host allows no user namespaces, which doze needs, see `doze doctor`: %v", err))
	}
	_ = cmd.Wait() // its exit code says it
	return cmd.ProcessState.ExitCode()
}

// LoopbackUp makes 127.0.0.1 usable in the network namespace of the thread.
func LoopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
