package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/doze-run/doze/test/testnode"
)

// peerAddress, peerGateway and peerNetmask are slirp4netns' own; pasta gets the same.
// Both lead the gateway's address to the loopback of the host.
const (
	peerAddress = "10.0.2.100"
	peerGateway = "10.0.2.2"
	peerNetmask = "255.255.255.0"
)

// peerMTU is what Podman gives both, and our device.
const peerMTU = "65520"

// findPeer returns a program of a Debian package, or why there is none. Squid is
// where users do not look.
func findPeer(program string) (string, error) {
	for _, name := range []string{program, "/usr/sbin/" + program} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not installed", program)
}

// inSession runs a program in a session of its own, for the scheduler: see
// measureThroughput.
func inSession(cmd *exec.Cmd) *exec.Cmd {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Setsid = true
	return cmd
}

// streamBeside is a client's stream through a peer that gives a namespace a network.
type streamBeside func(ctx context.Context, b *bench, t task) (clientResult, error)

// throughPasta lets pasta make the namespace and run the client in it.
func throughPasta(ctx context.Context, b *bench, t task) (clientResult, error) {
	pasta, err := findPeer("pasta")
	if err != nil {
		return clientResult{}, err
	}
	return readClient(inSession(exec.CommandContext(ctx, pasta,
		"--quiet", "--config-net", "-m", peerMTU, "-a", peerAddress, "-n", peerNetmask, "-g", peerGateway, "--ipv4-only",
		"-t", "none", "-u", "none", "-T", "none", "-U", "none", "--", b.node.Program("bench"), "client", t.argument())))
}

// throughSlirp starts the client in a namespace, where it waits for slirp4netns.
func throughSlirp(ctx context.Context, b *bench, t task) (_ clientResult, err error) {
	slirp, err := findPeer("slirp4netns")
	if err != nil {
		return clientResult{}, err
	}
	t.Wait = true
	client := exec.CommandContext(ctx, b.node.Program("bench"), "client", t.argument())
	client.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	begin, err := client.StdinPipe()
	if err != nil {
		return clientResult{}, err
	}
	var out, complaint bytes.Buffer
	client.Stdout, client.Stderr = &out, &complaint
	if err := inSession(client).Start(); err != nil {
		return clientResult{}, err
	}
	ready, says, err := os.Pipe()
	if err == nil {
		peer := inSession(exec.CommandContext(ctx, slirp, "--configure", "--mtu="+peerMTU, "--ready-fd=3", fmt.Sprint(client.Process.Pid), "tap0"))
		peer.ExtraFiles, peer.Stderr = []*os.File{says}, &complaint
		if err = peer.Start(); err == nil {
			defer peer.Wait()
			defer peer.Process.Kill()
			says.Close()
			if n, _ := ready.Read(make([]byte, 1)); n == 1 {
				_, err = io.WriteString(begin, "ready\n")
			} else {
				err = errors.New("slirp4netns did not get ready")
			}
		}
		ready.Close()
		says.Close()
	}
	if err != nil {
		_ = client.Process.Kill()
	}
	if e := client.Wait(); err != nil || e != nil {
		return clientResult{}, fmt.Errorf("%w: %s", errors.Join(err, e), complaint.String())
	}
	return parseClient(out.Bytes())
}

// readClient runs a client to its end.
func readClient(cmd *exec.Cmd) (r clientResult, err error) {
	out, err := output(cmd)
	if err != nil {
		return r, err
	}
	return parseClient(out)
}

// output runs a program, whose error then contains what it wrote on standard error.
func output(cmd *exec.Cmd) ([]byte, error) {
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	return out, err
}

func parseClient(out []byte) (r clientResult, err error) {
	if err := json.Unmarshal(out, &r); err != nil {
		return r, fmt.Errorf("a client said %q: %w", out, err)
	}
	return r, nil
}

// proxy is a peer that intercepts TLS as an explicit proxy.
type proxy struct {
	URL string
	CA  string // file
	cmd *exec.Cmd
}

func (p *proxy) stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // with its helpers; it may have ended
	_ = p.cmd.Wait()
}

// startMitmproxy starts mitmdump, which adds the same header and verifies the origin.
func startMitmproxy(ctx context.Context, folder, originCA string) (*proxy, error) {
	program, err := findPeer("mitmdump")
	if err != nil {
		return nil, err
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	host, port, _ := strings.Cut(address, ":")
	p := &proxy{URL: "http://" + address, CA: filepath.Join(folder, "mitmproxy-ca-cert.pem")}
	p.cmd = exec.CommandContext(ctx, program, "--quiet", "--listen-host", host, "--listen-port", port,
		"--set", "confdir="+folder, "--set", "ssl_verify_upstream_trusted_ca="+originCA, "--set", "flow_detail=0",
		"--modify-headers", "/~q/Authorization/Bearer "+benchToken)
	return p, p.start(ctx, address)
}

// startSquid starts squid with bump, which adds the same header and verifies the
// origin. It keeps neither a cache nor a log, so that it has nothing else to do.
func startSquid(ctx context.Context, folder, originCA string) (*proxy, error) {
	program, err := findPeer("squid")
	if err != nil {
		return nil, err
	}
	const certgen = "/usr/lib/squid/security_file_certgen"
	if _, err := os.Stat(certgen); err != nil {
		return nil, errors.New("squid is there without TLS: it is of squid, not of squid-openssl")
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	p := &proxy{URL: "http://" + address, CA: filepath.Join(folder, "ca.pem")}
	if err := writeAuthority(p.CA); err != nil {
		return nil, err
	}
	database := filepath.Join(folder, "leaves")
	if out, err := exec.CommandContext(ctx, certgen, "-c", "-s", database, "-M", "4MB").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("create squid's database: %w: %s", err, out)
	}
	config := filepath.Join(folder, "squid.conf")
	if err := os.WriteFile(config, []byte(strings.Join([]string{
		"http_port " + address + " ssl-bump cert=" + p.CA + " generate-host-certificates=on dynamic_cert_mem_cache_size=4MB",
		"sslcrtd_program " + certgen + " -s " + database + " -M 4MB",
		"acl step1 at_step SslBump1",
		"ssl_bump peek step1",
		"ssl_bump bump all",
		"tls_outgoing_options cafile=" + originCA,
		"http_access allow all",
		`request_header_add Authorization "Bearer ` + benchToken + `" all`,
		"cache deny all",
		"access_log none",
		"cache_log " + filepath.Join(folder, "cache.log"),
		"pid_filename none",
		"visible_hostname bench",
		"coredump_dir " + folder,
		"shutdown_lifetime 0 seconds",
	}, "\n")+"\n"), 0o600); err != nil {
		return nil, err
	}
	p.cmd = exec.CommandContext(ctx, program, "-N", "-f", config)
	return p, p.start(ctx, address)
}

// start starts the proxy and returns when it listens.
func (p *proxy) start(ctx context.Context, address string) error {
	var complaint bytes.Buffer
	p.cmd.Stdout, p.cmd.Stderr = &complaint, &complaint
	if err := inSession(p.cmd).Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	err := poll(ctx, 20*time.Millisecond, func() (bool, error) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return false, nil
		}
		return true, conn.Close()
	})
	if err != nil {
		p.stop()
		err = fmt.Errorf("%s does not listen: %w: %s", p.cmd.Path, err, complaint.String())
	}
	return err
}

func freeAddress() (string, error) {
	port, err := testnode.FreePort()
	return fmt.Sprint("127.0.0.1:", port), err
}

// writeAuthority makes an authority for squid: certificate and key in one file, RSA,
// as its documentation has it.
func writeAuthority(path string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "squid of the figures"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, authority, authority, &key.PublicKey, key)
	if err != nil {
		return err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, slices.Concat(
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})), 0o600)
}

// runBeside runs a client on the loopback, next to a peer.
func runBeside(ctx context.Context, b *bench, t task) (clientResult, error) {
	return readClient(inSession(exec.CommandContext(ctx, b.node.Program("bench"), "client", t.argument())))
}
