// Continue's adapter: streams the text of a gap. Arguments: URL of the server, model.
import { constructLlmApi } from '@continuedev/openai-adapters';

const [url, model] = process.argv.slice(2);
const api = constructLlmApi({ provider: 'openai', apiBase: `${url}/v1/`, apiKey: 'unused', model });
const gap = { model, prompt: 'def one():', suffix: 'return 1', max_tokens: 8, stream: true };
let text = '';
for await (const chunk of api.fimStream(gap, new AbortController().signal)) {
  text += chunk.choices[0]?.delta?.content ?? '';
}
console.log(JSON.stringify(text));
