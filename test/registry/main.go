// Command registry is a container registry for tests: the registry of the distribution project on a
// folder. It is a separate module, so that doze's module does not require its dependencies.
//
// It prints its URL as one line on stdout when it accepts requests. It ends on SIGTERM,
// and when stdin is closed, so that it does not outlive a test that dies.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/distribution/distribution/v3/configuration"
	_ "github.com/distribution/distribution/v3/registry/auth/htpasswd"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
	"github.com/sirupsen/logrus"
	"golang.org/x/crypto/bcrypt"
)

func main() {
	folder := flag.String("folder", "", "the folder of the blobs and tags")
	address := flag.String("address", "127.0.0.1:0", "the loopback address to listen on; port 0 is a free port")
	user := flag.String("user", "", "the only user; without it, every client is permitted")
	password := flag.String("password", "", "the password of the user")
	flag.Parse()
	if err := run(*folder, *address, *user, *password); err != nil {
		fmt.Fprintln(os.Stderr, "registry:", err)
		os.Exit(1)
	}
}

// run serves the folder. It returns only on errors.
func run(folder, address, user, password string) error {
	if folder == "" {
		return errors.New("-folder is required")
	}
	addr, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("-address: %w", err)
	}
	if !addr.Addr().IsLoopback() {
		return fmt.Errorf("-address: %s is not a loopback address", addr)
	}
	config := &configuration.Configuration{
		Storage: configuration.Storage{"filesystem": {"rootdirectory": folder}},
	}
	logrus.SetLevel(logrus.ErrorLevel)
	config.HTTP.Secret = "of a test" // signs the state of uploads
	if user != "" {
		hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
		if err != nil {
			return fmt.Errorf("-password: %w", err)
		}
		file := filepath.Join(folder, "htpasswd")
		if err := os.WriteFile(file, fmt.Appendf(nil, "%s:%s\n", user, hash), 0o600); err != nil {
			return err
		}
		config.Auth = configuration.Auth{"htpasswd": {"realm": "test", "path": file}}
	}
	listener, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr))
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	app := handlers.NewApp(context.Background(), config)
	fmt.Printf("http://%s\n", listener.Addr())
	return http.Serve(listener, app)
}
