//go:build integration

package e2e

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// Servers may listen on one address only, which is not always 127.0.0.1.
func TestServersOnAnyAddressOfTheSandboxAreReached(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	c := n.browser(t, "h2")
	own := strings.TrimSpace(b.exec(`node -p 'Object.values(os.networkInterfaces()).flat().find(i => !i.internal && i.family === "IPv4").address'`))
	for i, address := range []string{own, "127.0.0.2", "::1"} {
		port := 4000 + i
		_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"node", "-e", `http.createServer((q, s) => s.end("on " + process.argv[1])).listen(process.argv[2], process.argv[1])`, address, strconv.Itoa(port)}}, Name: "on-" + strconv.Itoa(port), Restart: "on_wake"})
		b.must(err)
		exposed, err := n.API.Expose(testkit.Context(t), b.id, types.ExposePortRequest{Port: uint16(port), WaitTimeout: types.Duration(testkit.Patience)})
		b.must(err)
		if text, _, err := fetch(t.Context(), c, exposed.URL, http.StatusOK); err != nil || text != "on "+address {
			t.Errorf("%s: %q, %v", address, text, err)
		}
	}
}
