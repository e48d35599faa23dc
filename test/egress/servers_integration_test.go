//go:build integration

package egress

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"

	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testca"
)

// servers are what the names under .test lead to, on the loopback: HTTPS on port
// 443, HTTP on port 80, an echo on port 7; HTTPS that speaks only HTTP/1.1; gRPC.
type servers struct {
	ca []byte // PEM of the authority of the certificate

	https, http *http.Server
	old         *http.Server // HTTP/1.1
	oldAddr     net.Addr
	tlsAddr     net.Addr
	plainAddr   net.Addr
	echo        net.Listener

	calls         *grpc.Server
	callsListener net.Listener
	repositories  string // folder of bare git repositories, below /git/

	mu   sync.Mutex
	seen []seen
	hold map[string]chan chan string // by host: requests that wait for a response
}

// seen is a request as a server got it.
type seen struct {
	Proto  string      `json:"proto"`
	Method string      `json:"method"`
	Host   string      `json:"host"`
	URI    string      `json:"uri"`
	Header http.Header `json:"header"`
	Body   string      `json:"body"`
}

func startServers() (*servers, error) {
	s := &servers{}
	certificate, ca, err := testca.New(append(presetHosts(), "*.test", "*.pass.test", "*.look.test", "*.old.test")...)
	if err != nil {
		return nil, err
	}
	s.ca = ca
	quiet := log.New(io.Discard, "", 0)
	s.https = &http.Server{Handler: s.routes(), ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}}}
	s.http = &http.Server{Handler: s.routes(), ErrorLog: quiet}
	s.old = &http.Server{Handler: s.routes(), ErrorLog: quiet, TLSConfig: s.https.TLSConfig.Clone(), Protocols: new(http.Protocols)}
	s.old.Protocols.SetHTTP1(true)
	listeners := make([]net.Listener, 4)
	for i := range listeners {
		if listeners[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return nil, err
		}
	}
	s.tlsAddr, s.plainAddr, s.echo = listeners[0].Addr(), listeners[1].Addr(), listeners[2]
	s.oldAddr = listeners[3].Addr()
	go s.old.ServeTLS(listeners[3], "", "")
	go s.https.ServeTLS(listeners[0], "", "") // end in close
	go s.http.Serve(listeners[1])
	go s.serveEcho()
	if s.repositories, err = os.MkdirTemp("", "repositories"); err != nil {
		return nil, err
	}
	return s, s.startCalls(certificate)
}

func (s *servers) close() {
	s.https.Close()
	s.http.Close()
	s.old.Close()
	s.echo.Close()
	s.calls.Stop()
	os.RemoveAll(s.repositories)
}

// resolve returns the lines of the Caddyfile that make names lead here, including the names
// of all presets: no test reaches the services.
func (s *servers) resolve() []string {
	lines := []string{
		fmt.Sprintf("resolve *.test %s", s.tlsAddr),
		fmt.Sprintf("resolve *.plain.test %s", s.plainAddr),
		fmt.Sprintf("resolve *.echo.test %s", s.echo.Addr()),
		fmt.Sprintf("resolve calls.look.test %s", s.callsListener.Addr()),
		fmt.Sprintf("resolve calls.pass.test %s", s.callsListener.Addr()),
		fmt.Sprintf("resolve *.old.test %s", s.oldAddr),
	}
	for _, host := range append(presetHosts(), mirrors...) {
		lines = append(lines, fmt.Sprintf("resolve %s %s", host, s.tlsAddr))
	}
	return lines
}

// presetHosts returns the hosts of all presets.
func presetHosts() []string {
	var hosts []string
	for _, p := range preset.All() {
		hosts = append(hosts, p.Hosts...)
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}

func (s *servers) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", s.reflect)
	mux.HandleFunc("/hold", s.wait)
	s.serveClients(mux)
	mux.HandleFunc("/elsewhere", elsewhere)
	mux.HandleFunc("/mirror/{form}", s.mirror)
	mux.HandleFunc("/broken/{form}", s.broken)
	return mux
}

// reflect responds with the request, and stores it.
func (s *servers) reflect(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	got := seen{r.Proto, r.Method, r.Host, r.RequestURI, r.Header, string(body)}
	s.mu.Lock()
	s.seen = append(s.seen, got)
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(got)
}

// elsewhere sends the client to where it asks to be sent, and offers HTTP/3.
func elsewhere(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Alt-Svc", `h3=":443"; ma=86400`)
	w.Header().Set("Location", r.URL.Query().Get("to"))
	w.WriteHeader(http.StatusFound)
}

// serveEcho echoes its input, after a greeting: its clients listen first.
func (s *servers) serveEcho() {
	for {
		conn, err := s.echo.Accept()
		if err != nil {
			return
		}
		go func() { // ends with its client
			defer conn.Close()
			fmt.Fprintln(conn, "220 hello")
			_, _ = io.Copy(conn, conn)
		}()
	}
}

// requests returns those that a host got.
func (s *servers) requests(host string) (list []seen) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.seen {
		if strings.EqualFold(r.Host, host) {
			list = append(list, r)
		}
	}
	return list
}

// wait responds when a test releases it.
func (s *servers) wait(w http.ResponseWriter, r *http.Request) {
	answer := make(chan string)
	select {
	case s.holding(r.Host) <- answer:
	case <-r.Context().Done():
		return
	}
	select {
	case text := <-answer:
		_, _ = io.WriteString(w, text)
	case <-r.Context().Done():
	}
}

func (s *servers) holding(host string) chan chan string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold == nil {
		s.hold = map[string]chan chan string{}
	}
	if s.hold[host] == nil {
		s.hold[host] = make(chan chan string)
	}
	return s.hold[host]
}

// held waits until a host got a request for /hold, and returns the function that responds.
func (s *servers) held(t *testing.T, host string) (release func(text string)) {
	t.Helper()
	select {
	case answer := <-s.holding(host):
		return func(text string) {
			select {
			case answer <- text:
			case <-testkit.Context(t).Done():
				t.Error("the waiting client has left")
			}
		}
	case <-testkit.Context(t).Done():
		t.Fatalf("%s got no request", host)
		return nil
	}
}
