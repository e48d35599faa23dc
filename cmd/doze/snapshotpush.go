package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/archive/ociimage/registry"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) pushSnapshotCommand() *cobra.Command {
	verify := true
	cmd := &cobra.Command{
		Use:   "push SNAPSHOT DESTINATION",
		Short: "Export a snapshot as a container image",
		Long: `Export a snapshot as a container image, with the files of the snapshot and the layers of the
image that it is based on. DESTINATION is one of

  docker://REGISTRY/REPOSITORY:TAG  a registry; the default of TAG is latest
  oci-archive:FILE                  an archive for podman load and docker load; - is standard output
  docker-archive:FILE               the same archive; it has both formats
  oci:FOLDER                        an OCI image layout in a new folder

The credentials for a registry come from "podman login" or "docker login" on this machine, and from
credential helpers. Layers that the registry has are not uploaded. The command prints the image
with its digest.

A failed export leaves no files behind, and no tag in a registry. In files, the image is named
localhost/SANDBOX:SNAPSHOT. The environment, declared processes and other settings of the sandbox
are not part of it.`,
		Example: `  doze snapshot push before-upgrade docker://registry.example.com/team/shop:1
  doze snapshot push before-upgrade oci-archive:shop.tar
  doze snapshot push before-upgrade oci-archive:- | ssh other-node podman load`,
		Args: wants(2, 2),
		ValidArgsFunction: a.complete(func(ctx context.Context, node *client.Client, args []string) []string {
			if len(args) > 0 {
				return nil
			}
			return snapshotNames(ctx, node, nil)
		}),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			to, err := a.parseDestination(args[1])
			if err != nil {
				return err
			}
			open := func() (io.ReadCloser, error) {
				done := a.waiting("exporting " + args[0])
				defer done()
				return node.ExportSnapshot(ctx, args[0])
			}
			switch {
			case to.transport == registryTransport:
				return a.pushToRegistry(ctx, to, !verify, open)
			case !verify:
				return usage.Errorf("--tls-verify applies to docker://REGISTRY/REPOSITORY:TAG; omit it for %s", args[1])
			}
			c := &copying{app: a, progress: newProgress(a.err)}
			err = to.write(a.out, open, c.counting)
			c.progress.clear()
			if to.isStandardOutput() {
				return err
			}
			result := map[string]any{"destination": args[1], "bytes": c.bytes.Load()}
			return a.print(err, result, "%s  %s", args[1], size(c.bytes.Load()))
		}),
	}
	cmd.Flags().BoolVar(&verify, "tls-verify", true, "verify the registry's certificate; =false also permits HTTP, which loopback may use anyway")
	return cmd
}

// destination is a parsed DESTINATION argument.
type destination struct {
	transport, path string
	image           registry.Reference // for registryTransport
}

// Transports of destinations, with the names that Podman and skopeo use.
const (
	registryTransport = "docker"
	ociFolder         = "oci"
	ociArchive        = "oci-archive"
	dockerArchive     = "docker-archive"
)

func (a *app) parseDestination(text string) (destination, error) {
	transport, path, _ := strings.Cut(text, ":")
	to := destination{transport: transport, path: path}
	switch {
	case transport == registryTransport:
		return a.parseRegistryDestination(to)
	case !slices.Contains([]string{ociFolder, ociArchive, dockerArchive}, transport):
		return to, usage.Errorf("%q is not a destination; use docker://REGISTRY/REPOSITORY:TAG, oci-archive:FILE, docker-archive:FILE or oci:FOLDER", text)
	case transport == ociFolder && strings.Contains(strings.TrimPrefix(path, filepath.VolumeName(path)), ":"):
		return to, usage.Errorf("%q has a tag; doze names the image localhost/SANDBOX:SNAPSHOT, so omit the tag", text)
	case path == "" || path == "-" && transport == ociFolder:
		return to, usage.Errorf("%q has no path; use %s:shop, for example", text, transport)
	case to.isStandardOutput() && isTerminal(a.out):
		return to, fmt.Errorf("- is an archive, and standard output is a terminal; redirect it, or name a file: %s:FILE", transport)
	case to.isStandardOutput() && a.json:
		return to, usage.Errorf("standard output cannot have both an archive and JSON; omit --json")
	}
	return to, nil
}

func (to destination) isStandardOutput() bool { return to.path == "-" }

// write writes the archive that open returns. It creates the file or folder before it calls open, and
// deletes it after an error.
func (to destination) write(out io.Writer, open func() (io.ReadCloser, error), counted func(io.Reader) io.Reader) error {
	copied := func(use func(io.Reader) error) error {
		archive, err := open()
		if err != nil {
			return err
		}
		defer archive.Close()
		return use(counted(archive))
	}
	toWriter := func(w io.Writer) error {
		return copied(func(r io.Reader) error {
			_, err := io.Copy(w, r)
			return err
		})
	}
	switch {
	case to.isStandardOutput():
		return toWriter(out)
	case to.transport == ociFolder:
		return to.writeFolder(func(root *os.Root) error {
			return copied(func(r io.Reader) error { return ociimage.Unpack(root, r) })
		})
	}
	return to.writeFile(toWriter)
}

func (to destination) writeFolder(write func(*os.Root) error) error {
	err := os.Mkdir(to.path, 0o777)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s exists; name a new folder", to.path)
	}
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(to.path)
	if err == nil {
		err = errors.Join(write(root), root.Close())
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(to.path))
	}
	return nil
}

func (to destination) writeFile(write func(io.Writer) error) error {
	partial, err := os.CreateTemp(filepath.Dir(to.path), filepath.Base(to.path)+".partial-*") // mode 0600
	if err != nil {
		return err
	}
	err = errors.Join(write(partial), partial.Close())
	if err == nil {
		err = os.Rename(partial.Name(), to.path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(partial.Name()))
	}
	return nil
}
