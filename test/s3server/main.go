// Command s3server is an S3 server for tests: versitygw's S3 API on a folder. Each
// subfolder is a bucket, and each file in it is an object. It is a separate module, so
// that doze's module does not require the dependencies of versitygw.
//
// It prints its URL as one line on stdout when it accepts requests. It ends on SIGTERM,
// and when stdin is closed, so that it does not outlive a test that dies.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/versity/versitygw/auth"
	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/s3api"
	"github.com/versity/versitygw/s3api/middlewares"
)

// region is the region that clients sign requests for.
const region = "us-east-1"

// attempts limits the ports that run tries if another process binds the free port first.
const attempts = 20

// connections limits the connections and the concurrent requests.
const connections = 1024

// maxParts is the maximum number of parts of a multipart upload, as in Amazon S3.
const maxParts = 10_000

// maxCopy is the maximum size in bytes of an object that one request copies, as in Amazon S3.
const maxCopy = 5 << 30

func main() {
	folder := flag.String("folder", "", "the folder of the buckets; its file system must support extended attributes")
	address := flag.String("address", "127.0.0.1:0", "the loopback address to listen on; port 0 is a free port")
	access := flag.String("access", "", "the access key of the only account")
	secret := flag.String("secret", "", "the secret key of the only account")
	flag.Parse()
	if err := run(*folder, *address, *access, *secret); err != nil {
		fmt.Fprintln(os.Stderr, "s3server:", err)
		os.Exit(1)
	}
}

// run serves the folder. It returns only on errors.
func run(folder, address, access, secret string) error {
	if folder == "" || access == "" || secret == "" {
		return errors.New("-folder, -access and -secret are required")
	}
	addr, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("-address: %w", err)
	}
	if !addr.Addr().IsLoopback() {
		return fmt.Errorf("-address: %s is not a loopback address", addr)
	}
	if err := checkAttributes(folder); err != nil {
		return err
	}
	backend, err := posix.New(folder, meta.XattrMeta{}, posix.PosixOpts{CopyObjectThreshold: maxCopy})
	if err != nil {
		return fmt.Errorf("open %s: %w", folder, err)
	}
	var bound netip.AddrPort
	server, err := s3api.New(backend,
		middlewares.RootUserConfig{Access: access, Secret: secret}, region,
		rootOnly{},
		nil, nil, nil, nil, // no logs, events or metrics
		s3api.WithConcurrencyLimiter(connections, connections),
		s3api.WithMpMaxParts(maxParts),
		s3api.WithQuiet(),
		s3api.WithOnListen(func() { fmt.Printf("http://%s\n", bound) }),
	)
	if err != nil {
		return fmt.Errorf("start versitygw: %w", err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	// versitygw does not report the port that it is bound to.
	for range attempts {
		bound = addr
		if addr.Port() == 0 {
			if bound, err = freePort(addr); err != nil {
				return err
			}
		}
		err = server.ServeMultiPort([]string{bound.String()})
		if addr.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return fmt.Errorf("serve on %s: %w", bound, err)
}

// rootOnly has no accounts: versitygw does not look up the root account in it. Unlike
// with versitygw's own single-account mode, other access keys fail with InvalidAccessKeyId and
// status 403, as in Amazon S3.
type rootOnly struct{ auth.IAMServiceSingle }

func (rootOnly) GetUserAccount(string) (auth.Account, error) {
	return auth.Account{}, auth.ErrNoSuchUser
}

// checkAttributes sets an extended attribute on the folder and removes it.
func checkAttributes(folder string) error {
	const name = "user.doze-s3server"
	err := syscall.Setxattr(folder, name, []byte("test"), 0)
	if err == nil {
		err = syscall.Removexattr(folder, name)
	}
	if errors.Is(err, syscall.ENOTSUP) {
		return fmt.Errorf("the file system of %s does not support extended attributes of users; "+
			"use ext4, XFS or Btrfs, or tmpfs on Linux 6.6 or later", folder)
	}
	if err != nil {
		return fmt.Errorf("set an extended attribute of %s: %w", folder, err)
	}
	return nil
}

// freePort returns addr with a port that is not in use.
func freePort(addr netip.AddrPort) (netip.AddrPort, error) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr))
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("find a free port on %s: %w", addr.Addr(), err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort(), nil
}
