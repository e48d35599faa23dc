package guest_test

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

func TestHelloRefusesAGuestOfAnotherProtocol(t *testing.T) {
	for name, c := range map[string]struct {
		protocol int
		refused  bool
	}{
		"ours":    {guest.ProtocolVersion, false},
		"older":   {guest.ProtocolVersion - 1, true},
		"newer":   {guest.ProtocolVersion + 1, true},
		"unknown": {-7, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "doze") // a socket's path must be short
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			socket := filepath.Join(dir, guest.SocketName)
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"protocol":%d,"version":"v9%01000d"}`, c.protocol, 0)
			})}
			go srv.Serve(l) // ends with Close
			t.Cleanup(func() { srv.Close() })

			client := guest.NewClient(socket)
			defer client.Close()
			hello, err := client.Hello(t.Context())
			var version *guest.VersionError
			if got := errors.As(err, &version); got != c.refused {
				t.Fatalf("refused is %v, want %v; error %v", got, c.refused, err)
			}
			sent := hello.Version
			if c.refused {
				sent = version.Version
			}
			if len(sent) > 110 || !strings.HasPrefix(sent, "v9") {
				t.Errorf("its version is %q", sent)
			}
			if c.refused && (version.Guest != c.protocol || version.Node != guest.ProtocolVersion) {
				t.Errorf("the error says %+v", version)
			}
		})
	}
}
