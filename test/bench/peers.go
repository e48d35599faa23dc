package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
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
	var out, clientErrors, peerErrors bytes.Buffer
	client.Stdout, client.Stderr = &out, &clientErrors
	if err := inSession(client).Start(); err != nil {
		return clientResult{}, err
	}
	peer := inSession(exec.CommandContext(ctx, slirp, "--configure", "--mtu="+peerMTU, "--ready-fd=3", fmt.Sprint(client.Process.Pid), "tap0"))
	peer.Stderr = &peerErrors
	if err = startReady(peer); err == nil {
		_, err = io.WriteString(begin, "ready\n")
	}
	if err != nil {
		_ = client.Process.Kill()
	}
	err = errors.Join(err, client.Wait())
	if peer.Process != nil {
		_ = peer.Process.Kill() // it may have ended
		_ = peer.Wait()
	}
	if err != nil {
		return clientResult{}, fmt.Errorf("%w: %s%s", err, clientErrors.String(), peerErrors.String())
	}
	return parseClient(out.Bytes())
}

// startReady starts a program, and returns when it has written to its descriptor 3.
func startReady(cmd *exec.Cmd) error {
	ready, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd.ExtraFiles = []*os.File{writer}
	err = cmd.Start()
	writer.Close()
	if err != nil {
		return err
	}
	if n, _ := ready.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("%s did not get ready", cmd.Path)
	}
	return nil
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
		return r, fmt.Errorf("a client printed %q: %w", out, err)
	}
	return r, nil
}

// proxy is a peer that intercepts TLS. Its files are in a folder of its own.
type proxy struct {
	address, folder string
	originCA        string // file
	origin          string // URL for clients

	URL string // of an explicit proxy; empty if origin leads to it
	CA  string // file
	cmd *exec.Cmd
}

// startProxy starts the program that prepare returns, and returns when it listens.
func startProxy(ctx context.Context, n *node, prepare func(context.Context, *proxy) (*exec.Cmd, error)) (p *proxy, err error) {
	p = &proxy{originCA: n.originCA(), origin: n.origin.local()}
	if p.folder, err = os.MkdirTemp(n.folder, "peer"); err != nil {
		return nil, err
	}
	port, err := testnode.FreePort()
	if err != nil {
		return nil, err
	}
	p.address, p.CA = fmt.Sprint("127.0.0.1:", port), filepath.Join(p.folder, "ca.pem")
	p.URL = "http://" + p.address
	if p.cmd, err = prepare(ctx, p); err != nil {
		return nil, err
	}
	var log bytes.Buffer
	p.cmd.Stdout, p.cmd.Stderr = &log, &log
	if err := inSession(p.cmd).Start(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	if err := poll(ctx, 20*time.Millisecond, func() (bool, error) {
		conn, err := net.Dial("tcp", p.address)
		if err != nil {
			return false, nil
		}
		return true, conn.Close()
	}); err != nil {
		p.stop()
		return nil, fmt.Errorf("%s does not listen: %w: %s", p.cmd.Path, err, log.String())
	}
	return p, nil
}

func (p *proxy) stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // with its helpers; it may have ended
	_ = p.cmd.Wait()
}

// mitmproxy is mitmdump, which adds the same header and verifies the origin.
func mitmproxy(ctx context.Context, p *proxy) (*exec.Cmd, error) {
	program, err := findPeer("mitmdump")
	if err != nil {
		return nil, err
	}
	p.CA = filepath.Join(p.folder, "mitmproxy-ca-cert.pem")
	host, port, _ := strings.Cut(p.address, ":")
	return exec.CommandContext(ctx, program, "--quiet", "--listen-host", host, "--listen-port", port,
		"--set", "confdir="+p.folder, "--set", "ssl_verify_upstream_trusted_ca="+p.originCA, "--set", "flow_detail=0",
		"--modify-headers", "/~q/Authorization/Bearer "+benchToken), nil
}

// squid with bump adds the same header and verifies the origin. It keeps neither a cache
// nor a log, so that it has nothing else to do.
func squid(ctx context.Context, p *proxy) (*exec.Cmd, error) {
	program, err := findPeer("squid")
	if err != nil {
		return nil, err
	}
	const certgen = "/usr/lib/squid/security_file_certgen"
	if _, err := os.Stat(certgen); err != nil {
		return nil, errors.New("squid is there without TLS: it is of squid, not of squid-openssl")
	}
	database, config := filepath.Join(p.folder, "leaves"), filepath.Join(p.folder, "squid.conf")
	for _, command := range []*exec.Cmd{
		// An authority, as squid's documentation has it: certificate and key in one file, RSA.
		exec.CommandContext(ctx, "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
			"-subj", "/CN=squid of the figures", "-keyout", p.CA, "-out", p.CA),
		exec.CommandContext(ctx, certgen, "-c", "-s", database, "-M", "4MB"),
	} {
		if _, err := output(command); err != nil {
			return nil, fmt.Errorf("%s: %w", command.Path, err)
		}
	}
	return exec.CommandContext(ctx, program, "-N", "-f", config), os.WriteFile(config, []byte(strings.Join([]string{
		"http_port " + p.address + " ssl-bump cert=" + p.CA + " generate-host-certificates=on dynamic_cert_mem_cache_size=4MB",
		"sslcrtd_program " + certgen + " -s " + database + " -M 4MB",
		"acl step1 at_step SslBump1",
		"ssl_bump peek step1",
		"ssl_bump bump all",
		"tls_outgoing_options cafile=" + p.originCA,
		"http_access allow all",
		`request_header_add Authorization "Bearer ` + benchToken + `" all`,
		"cache deny all",
		"access_log none",
		"cache_log " + filepath.Join(p.folder, "cache.log"),
		"pid_filename none",
		"visible_hostname bench",
		"coredump_dir " + p.folder,
		"shutdown_lifetime 0 seconds",
	}, "\n")+"\n"), 0o600)
}
