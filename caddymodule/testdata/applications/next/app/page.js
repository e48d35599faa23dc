let said = "nothing";

async function say(form) {
  "use server";
  said = form.get("word");
}

export const dynamic = "force-dynamic";

export default function Page() {
  return <form action={say}><p>said: {said}</p><input name="word" /></form>;
}
